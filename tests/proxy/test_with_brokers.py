"""The proxy's handlers over real brokers in this process: what only both together can show."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from proxy.houses import AwaitedCall, House, house

from popmq.common.errors import Code
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

ORDERS = admin_pb2.Topic(name="orders", queues=4, type="fifo", permission="rw")
WORKERS = admin_pb2.Group(name="workers", max_attempts=3, back_off_ms=[1_000, 5_000])


async def test_an_admins_bytes_that_are_no_request_are_a_bad_request_in_the_reply(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with house(tmp_path, "a") as at:
        for name in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods_by_name:
            (sent,) = await at.raw(name, b"\xff")
            status = admin_pb2.TopicReply.FromString(sent).status
            answer = (Code.BAD_REQUEST, f"the request is no {name}Request")
            assert (status.code, status.message) == answer

    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("kind", ["delay", "mixed"])
async def test_a_delayed_message_whose_time_is_over_is_delivered_at_once(
    tmp_path: Path, kind: str
) -> None:
    async with house(tmp_path, "a") as at:
        topic = admin_pb2.Topic(name="later", queues=1, type=kind)
        assert (await at.change_topic("CreateTopic", topic))[0] == Code.OK
        sent = pb.Message(topic=pb.Resource(name="later"), body=b"x")
        sent.system_properties.message_id = "m-1"
        sent.system_properties.message_type = pb.MessageType.DELAY
        sent.system_properties.delivery_timestamp.CopyFrom(Timestamp(seconds=1))
        request = service.SendMessageRequest(messages=[sent])
        reply = await at.ask("SendMessage", request, service.SendMessageResponse)
        assert reply.entries[0].status.code == Code.OK
        receive = service.ReceiveMessageRequest(
            group=pb.Resource(name="workers"),
            message_queue=pb.MessageQueue(topic=pb.Resource(name="later")),
            invisible_duration=Duration(seconds=10),
            long_polling_timeout=Duration(),
        )
        ids = [message.system_properties.message_id for message in await at.receive(receive)]
        assert ids == ["m-1"]


async def test_what_a_client_that_left_before_the_reply_popped_is_delivered_as_the_same_attempt(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        topic = admin_pb2.Topic(name="jobs", queues=1)
        assert (await at.change_topic("CreateTopic", topic))[0] == Code.OK
        sent = pb.Message(topic=pb.Resource(name="jobs"), body=b"x")
        sent.system_properties.message_id = "m-1"
        request = service.SendMessageRequest(messages=[sent])
        await at.ask("SendMessage", request, service.SendMessageResponse)
        receive = service.ReceiveMessageRequest(
            group=pb.Resource(name="workers"),
            message_queue=pb.MessageQueue(topic=pb.Resource(name="jobs")),
            invisible_duration=Duration(seconds=600),
            long_polling_timeout=Duration(seconds=10),
        )
        left = AwaitedCall()
        start = at.methods["ReceiveMessage"].start
        assert start is not None
        start(left, receive.SerializeToString())  # it popped, and waits for the disk
        left.leave()
        (got,) = await at.receive(receive)
        assert (got.body, got.system_properties.delivery_attempt) == (b"x", 1)
        assert not left.sent


async def receive_in_order(at: House, *, batch: int, attempt_id: str = "") -> list[pb.Message]:
    request = service.ReceiveMessageRequest(
        group=pb.Resource(name="in-order"),
        message_queue=pb.MessageQueue(topic=pb.Resource(name="orders")),
        batch_size=batch,
        invisible_duration=Duration(seconds=10),
        long_polling_timeout=Duration(),
        attempt_id=attempt_id,
    )
    return await at.receive(request)


async def test_a_fifo_group_receives_each_message_group_in_order_and_the_same_attempt_again(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        assert (await at.change_topic("CreateTopic", ORDERS))[0] == Code.OK
        group = admin_pb2.Group(name="in-order", type="fifo")
        request = admin_pb2.CreateGroupRequest(group=group)
        await at.ask("CreateGroup", request, admin_pb2.GroupReply)

        sent = service.SendMessageRequest()
        for name in ("x1", "x2", "y1", "x3"):
            message = sent.messages.add(topic=pb.Resource(name="orders"), body=name.encode())
            message.system_properties.message_id = name
            message.system_properties.message_group = name[0]
            message.system_properties.message_type = pb.MessageType.FIFO
        await at.ask("SendMessage", sent, service.SendMessageResponse)

        first = await receive_in_order(at, batch=1, attempt_id="once")
        (again,) = await receive_in_order(at, batch=1, attempt_id="once")
        system_property = first[0].system_properties
        assert again.system_properties.receipt_handle == system_property.receipt_handle
        assert (again.body, again.system_properties.delivery_attempt) == (first[0].body, 1)

        key = system_property.message_group
        others = await receive_in_order(at, batch=32, attempt_id="twice")
        assert key not in {message.system_properties.message_group for message in others}
        entry = service.AckMessageEntry(
            message_id=system_property.message_id, receipt_handle=system_property.receipt_handle
        )
        ack = service.AckMessageRequest(
            group=pb.Resource(name="in-order"),
            topic=pb.Resource(name="orders"),
            entries=[entry],
        )
        assert (await at.ask("AckMessage", ack, service.AckMessageResponse)).status.code == Code.OK
        rest = await receive_in_order(at, batch=32)
        bodies = [message.body for message in (*first, *others, *rest)]
        assert [body for body in bodies if body[:1] == b"x"] == [b"x1", b"x2", b"x3"]
        assert sorted(bodies) == [b"x1", b"x2", b"x3", b"y1"]


async def test_a_fifo_group_is_assigned_every_queue_of_every_broker(tmp_path: Path) -> None:
    async with house(tmp_path, "a", "b") as at:
        assert (await at.change_topic("CreateTopic", ORDERS))[0] == Code.OK
        group = admin_pb2.Group(name="in-order", type="fifo")
        group_request = admin_pb2.CreateGroupRequest(group=group)
        await at.ask("CreateGroup", group_request, admin_pb2.GroupReply)
        request = service.QueryAssignmentRequest(
            topic=pb.Resource(name="orders"), group=pb.Resource(name="in-order")
        )
        reply = await at.ask("QueryAssignment", request, service.QueryAssignmentResponse)
        queues = [assignment.message_queue for assignment in reply.assignments]
        names = sorted((queue.broker.name, queue.id) for queue in queues)
        assert names == [(broker, queue) for broker in "ab" for queue in range(4)]


async def send_orders(at: House, *numbers: int) -> None:
    for number in numbers:
        sent = pb.Message(topic=pb.Resource(name="orders"), body=b"%d" % number)
        sent.system_properties.message_id = f"m-{number}"
        request = service.SendMessageRequest(messages=[sent])
        reply = await at.ask("SendMessage", request, service.SendMessageResponse)
        assert reply.status.code == Code.OK


async def pull_on(at: House, broker: str) -> list[str]:
    """As a pull consumer does in one queue: its offset or the beginning, read on, say how far."""
    queue = pb.MessageQueue(topic=pb.Resource(name="orders"), broker=pb.Broker(name=broker))
    place: Any = {"group": pb.Resource(name="pullers"), "message_queue": queue}
    known = await at.ask("GetOffset", service.GetOffsetRequest(**place), service.GetOffsetResponse)
    if known.status.code == Code.OFFSET_NOT_FOUND:
        beginning = service.QueryOffsetRequest(
            message_queue=queue, query_offset_policy=pb.QueryOffsetPolicy.BEGINNING
        )
        known = await at.ask("QueryOffset", beginning, service.QueryOffsetResponse)
    assert known.status.code == Code.OK
    ids: list[str] = []
    offset = known.offset
    while True:
        expected = service.PullMessageRequest(
            **place, offset=offset, batch_size=3, long_polling_timeout=Duration()
        )
        raw = await at.raw("PullMessage", expected.SerializeToString())
        got = [service.PullMessageResponse.FromString(data) for data in raw]
        messages = [response.message for response in got if response.HasField("message")]
        ids += [message.system_properties.message_id for message in messages]
        offset = got[-1].next_offset
        if not messages:
            break
    done = service.UpdateOffsetRequest(**place, offset=offset)
    reply = await at.ask("UpdateOffset", done, service.UpdateOffsetResponse)
    assert reply.status.code == Code.OK
    return ids


async def test_a_pull_consumer_reads_every_queue_once_and_goes_on_where_it_was(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a", "b") as at:
        topic = admin_pb2.Topic(name="orders", queues=1)
        for name in ("a", "b"):
            await at.create_at(name, topic)
        await send_orders(at, *range(10))
        first = [await pull_on(at, "a"), await pull_on(at, "b")]
        assert all(first), "one broker got nothing"
        assert sorted(first[0] + first[1]) == sorted(f"m-{n}" for n in range(10))
        await send_orders(at, 10)
        assert await pull_on(at, "a") + await pull_on(at, "b") == ["m-10"]
