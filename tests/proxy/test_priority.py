"""Messages with a priority through the proxy: the queue that it stands for, at any broker."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from proxy.houses import House, house

from popmq.common.errors import Code
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

RANKED = admin_pb2.Topic(name="ranked", queues=4, type="priority")


async def send(at: House, name: str, **properties: Any) -> Any:
    message = pb.Message(topic=pb.Resource(name="ranked"), body=name.encode())
    message.system_properties.MergeFrom(pb.SystemProperties(message_id=name, **properties))
    request = service.SendMessageRequest(messages=[message])
    return (await at.ask("SendMessage", request, service.SendMessageResponse)).entries[0]


async def receive(at: House, *, limit: int = 32, wait: bool = False) -> list[pb.Message]:
    request = service.ReceiveMessageRequest(
        group=pb.Resource(name="workers"),
        message_queue=pb.MessageQueue(topic=pb.Resource(name="ranked")),
        batch_size=limit,
        invisible_duration=Duration(seconds=60),
        long_polling_timeout=Duration(seconds=5 if wait else 0),
    )
    return await at.receive(request)


async def test_a_priority_is_the_number_of_its_queue_and_the_highest_comes_first(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        assert (await at.change_topic("CreateTopic", RANKED))[0] == Code.OK
        for number, priority in enumerate((1, 3, 2, 9, 0)):
            kind = pb.PRIORITY if priority else pb.NORMAL  # as the Node client has it
            entry = await send(at, f"m-{number}", priority=priority, message_type=kind)
            assert entry.status.code == Code.OK
        assert (await send(at, "plain", message_type=pb.NORMAL)).status.code == Code.OK
        assert (await send(at, "none")).status.code == Code.OK
        got = await receive(at)
        bodies = [(message.body, message.system_properties.queue_id) for message in got]
        assert bodies == [
            (b"m-1", 3),
            (b"m-3", 3),  # the topic has 4 queues: 9 is as high as 3
            (b"m-2", 2),
            (b"m-0", 1),
            (b"m-4", 0),
            (b"plain", 0),
            (b"none", 0),
        ]
        assert {message.system_properties.message_type for message in got} == {pb.PRIORITY}
        assert got[1].system_properties.priority == 9


async def test_routes_say_that_a_topic_takes_priorities(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        assert (await at.change_topic("CreateTopic", RANKED))[0] == Code.OK
        request = service.QueryRouteRequest(topic=pb.Resource(name="ranked"))
        route = await at.ask("QueryRoute", request, service.QueryRouteResponse)
        assert {tuple(queue.accept_message_types) for queue in route.message_queues} == {
            (pb.PRIORITY, pb.NORMAL)
        }


@pytest.mark.parametrize("topic", ["normal", "mixed"])
async def test_other_topics_refuse_a_priority_that_they_could_not_keep(
    tmp_path: Path, topic: str
) -> None:
    async with house(tmp_path, "a") as at:
        other = admin_pb2.Topic(name="ranked", queues=4, type=topic)
        assert (await at.change_topic("CreateTopic", other))[0] == Code.OK
        entry = await send(at, "x", priority=1, message_type=pb.PRIORITY)
        assert entry.status.code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE


async def test_messages_keep_their_priority_at_a_broker_that_takes_them_for_another(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a", away=("b",)) as at:
        await at.create_at("a", RANKED)
        for number in range(12):
            entry = await send(at, f"m-{number}", priority=2, message_type=pb.PRIORITY)
            assert entry.status.code == Code.OK
        assert {message.system_properties.queue_id for message in await receive(at)} == {2}


async def test_a_receive_that_waits_gets_a_priority_as_it_comes(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        assert (await at.change_topic("CreateTopic", RANKED))[0] == Code.OK
        waiting = asyncio.create_task(receive(at, wait=True))
        await asyncio.sleep(0)
        await send(at, "late", priority=1, message_type=pb.PRIORITY)
        assert [message.body for message in await waiting] == [b"late"]
