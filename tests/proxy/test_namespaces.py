"""x-mq-namespace: the same names twice, without the two seeing each other, through every RPC."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from proxy.houses import AwaitedCall, House, house

from popmq.common.address import host_of
from popmq.common.errors import Code, PopmqError
from popmq.common.namespaces import check_namespace, without_namespace, wrap_namespace
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.messaging.publishers import Sender
from popmq.proxy.rpc.namespaces import NamespaceTranslator, _fields
from popmq.proxy.transport.interface import GrpcStatus

METHODS = [
    method.name for method in service.DESCRIPTOR.services_by_name["MessagingService"].methods
]


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        ("orders", "eu%orders"),
        ("eu%orders", "eu%orders"),
        ("us%orders", "eu%us%orders"),
        ("%DLQ%workers", "%DLQ%eu%workers"),
        ("%DLQ%eu%workers", "%DLQ%eu%workers"),
    ],
)
def test_a_name_gets_its_namespace_in_front_once(short: str, whole: str) -> None:
    assert wrap_namespace("eu", short) == whole
    assert wrap_namespace("eu", whole) == whole
    reported_without_namespace = without_namespace("eu", whole)
    assert reported_without_namespace is not None
    assert wrap_namespace("eu", reported_without_namespace) == whole


@pytest.mark.parametrize(
    "name", ["", "rmq_sys_meta", "%RETRY%g+t", "%PARKED%g+t", "TBW102", "CID_RMQ_SYS_TIMER"]
)
def test_what_is_refused_everywhere_is_not_let_in_by_a_namespace(name: str) -> None:
    assert wrap_namespace("eu", name) == name


@pytest.mark.parametrize("name", ["orders", "us%orders", "%DLQ%workers", "%DLQ%us%workers", "eu"])
def test_a_name_of_no_namespace_or_of_another_has_no_short_form(name: str) -> None:
    assert without_namespace("eu", name) is None


@pytest.mark.parametrize(
    ("namespace", "text"), [("a%b", "'a%b' has characters"), ("x" * 65, "65 characters")]
)
def test_a_namespace_with_a_name_that_it_cannot_have_is_refused(namespace: str, text: str) -> None:
    with pytest.raises(PopmqError, match=text) as caught:
        check_namespace(namespace)
    assert caught.value.code is Code.BAD_REQUEST


def holders(kind: Any) -> int:
    """How many fields of resources there are below a message type, counted in another way."""
    below = (field.message_type for field in kind.fields if field.message_type is not None)
    return sum(item is pb.Resource.DESCRIPTOR or holders(item) for item in below)


def count(fields: tuple[Any, ...]) -> int:
    return sum(1 if field.below is None else count(field.below) for field in fields)


@pytest.mark.parametrize("method", METHODS)
def test_every_resource_of_every_request_and_reply_is_known(method: str) -> None:
    translator = NamespaceTranslator("eu", method)
    for kind in (translator._request, translator._reply):
        assert count(_fields(kind.DESCRIPTOR)) == holders(kind.DESCRIPTOR)
    if method not in ("Heartbeat", "NotifyClientTermination"):
        assert count(_fields(translator._request.DESCRIPTOR)) > 0


def test_only_the_names_of_a_request_are_changed() -> None:
    sent = service.SendMessageRequest()
    message = sent.messages.add(topic=pb.Resource(resource_namespace="eu", name="orders"))
    message.body, message.user_properties["a"] = b"orders" * 100, "orders"
    message.system_properties.tag = "orders"
    whole = service.SendMessageRequest.FromString(
        NamespaceTranslator("eu", "SendMessage").inward(sent.SerializeToString())
    )
    message.topic.CopyFrom(pb.Resource(name="eu%orders"))
    assert whole == sent


class Tenant:
    """A client in a namespace."""

    def __init__(self, at: House, namespace: str, client_id: str = "me@1") -> None:
        self.at = at
        self.metadata = {"x-mq-client-id": client_id}
        if namespace:
            self.metadata["x-mq-namespace"] = namespace

    async def parts(self, name: str, request: Message, reply: type[Any]) -> list[Any]:
        waited = AwaitedCall()
        waited.metadata = self.metadata
        start = self.at.methods[name].start
        assert start is not None
        start(waited, request.SerializeToString())
        await waited.ended.wait()
        assert waited.status is GrpcStatus.OK
        return [reply.FromString(data) for data in waited.sent]

    async def ask(self, name: str, **fields: Any) -> Any:
        kind, reply = getattr(service, f"{name}Request"), getattr(service, f"{name}Response")
        (parts,) = await self.parts(name, kind(**fields), reply)
        return parts

    async def send(self, body: str, *, topic: str = "orders", **properties: Any) -> Any:
        message = pb.Message(topic=pb.Resource(name=topic), body=body.encode())
        message.system_properties.message_id = body
        message.system_properties.message_type = pb.NORMAL
        message.system_properties.MergeFrom(pb.SystemProperties(**properties))
        reply = await self.ask("SendMessage", messages=[message])
        return reply.entries[0]

    async def receive(self, *, topic: str = "orders", group: str = "workers") -> list[pb.Message]:
        request = service.ReceiveMessageRequest(
            group=pb.Resource(name=group),
            message_queue=pb.MessageQueue(topic=pb.Resource(name=topic)),
            invisible_duration=Duration(seconds=60),
            long_polling_timeout=Duration(),
        )
        parts = await self.parts("ReceiveMessage", request, service.ReceiveMessageResponse)
        return [part.message for part in parts if part.HasField("message")]

    async def about(self, name: str, message: pb.Message, **fields: Any) -> int:
        """An RPC about a delivery, named as official clients do: by what they received."""
        group = pb.Resource(name="workers")
        if name == "AckMessage":
            handle = message.system_properties.receipt_handle
            fields["entries"] = [service.AckMessageEntry(message_id="m", receipt_handle=handle)]
        else:
            fields["receipt_handle"] = message.system_properties.receipt_handle
        reply = await self.ask(name, topic=message.topic, group=group, **fields)
        code: int = reply.status.code
        return code


NAMES = [("eu%orders", "eu%workers"), ("us%orders", "us%workers"), ("orders", "workers")]


async def prepared(at: House, kind: str = "normal") -> None:
    """The same topic and group in two namespaces and in none."""
    for topic, group in NAMES:
        expected = admin_pb2.Topic(name=topic, queues=2, type=kind)
        assert (await at.change_topic("CreateTopic", expected))[0] == Code.OK
        request = admin_pb2.CreateGroupRequest(group=admin_pb2.Group(name=group, max_attempts=1))
        await at.ask("CreateGroup", request, admin_pb2.GroupReply)


def bodies(messages: list[pb.Message]) -> list[bytes]:
    return sorted(message.body for message in messages)


async def test_two_namespaces_with_the_same_names_do_not_see_each_others_messages(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        await prepared(at)
        tenants = {name: Tenant(at, name) for name in ("eu", "us", "")}
        for name, tenant in tenants.items():
            for number in range(5):
                entry = await tenant.send(f"{name}-{number}")
                assert entry.status.code == Code.OK
        for name, tenant in tenants.items():
            got = await tenant.receive()
            assert bodies(got) == [f"{name}-{number}".encode() for number in range(5)]
            for message in got:
                assert message.topic == pb.Resource(resource_namespace=name, name="orders")
                other = tenants["us" if name == "eu" else "eu"]
                message.topic.resource_namespace = ""
                refused = await other.about("AckMessage", message)
                assert refused == Code.INVALID_RECEIPT_HANDLE
                assert await tenant.about("AckMessage", message) == Code.OK
            assert await tenant.receive() == []


async def test_a_message_id_that_another_namespace_used_is_no_resend(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await prepared(at)
        for name in ("eu", "us"):
            await Tenant(at, name).send("same-id")
            await Tenant(at, name).send("same-id")
        assert len(await Tenant(at, "eu").receive()) == 1
        assert len(await Tenant(at, "us").receive()) == 1


async def test_a_client_without_a_namespace_reaches_a_resource_by_its_whole_name(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        await prepared(at)
        await Tenant(at, "").send("x", topic="eu%orders")
        (seen,) = await Tenant(at, "").receive(topic="eu%orders", group="eu%workers")
        assert seen.topic == pb.Resource(name="eu%orders")
        await Tenant(at, "").send("y", topic="eu%orders")
        (other,) = await Tenant(at, "eu").receive()
        assert (other.body, other.topic.name) == (b"y", "orders")


async def test_routes_and_assignments_have_short_names_and_the_namespace(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await prepared(at)
        eu, names = Tenant(at, "eu"), pb.Resource(resource_namespace="eu", name="orders")
        route = await eu.ask("QueryRoute", topic=names)
        assert [queue.topic for queue in route.message_queues] == [names, names]
        answer = await eu.ask("QueryAssignment", topic=names, group=pb.Resource(name="workers"))
        assert [assignment.message_queue.topic for assignment in answer.assignments] == [names]
        missing = await eu.ask("QueryRoute", topic=pb.Resource(name="nothing"))
        assert missing.status.code == Code.TOPIC_NOT_FOUND
        assert "eu%nothing" in missing.status.message


async def test_a_change_and_a_rejection_stay_in_the_namespace_and_so_do_dead_letters(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        await prepared(at)
        eu, us = Tenant(at, "eu"), Tenant(at, "us")
        await eu.send("letter")
        (got,) = await eu.receive()
        got.topic.resource_namespace = ""
        again = {"invisible_duration": Duration(seconds=30)}
        refused = await us.about("ChangeInvisibleDuration", got, **again)
        assert refused == Code.INVALID_RECEIPT_HANDLE
        refused = await us.about("ForwardMessageToDeadLetterQueue", got)
        assert refused == Code.INVALID_RECEIPT_HANDLE
        assert await eu.about("ForwardMessageToDeadLetterQueue", got) == Code.OK

        letters = {"topic": "%DLQ%workers", "group": "readers"}
        assert await us.receive(**letters) == []
        (letter,) = await eu.receive(**letters)
        assert letter.body == b"letter"
        assert not letter.topic.name.startswith("eu%")


async def test_a_transaction_is_ended_in_its_namespace_alone(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await prepared(at, "transaction")
        eu, us = Tenant(at, "eu"), Tenant(at, "us")
        entry = await eu.send("half", message_type=pb.TRANSACTION)
        end = {
            "topic": pb.Resource(name="orders"),
            "message_id": "half",
            "transaction_id": entry.transaction_id,
            "resolution": pb.COMMIT,
        }
        assert (await us.ask("EndTransaction", **end)).status.code != Code.OK
        assert await eu.receive() == []
        assert (await eu.ask("EndTransaction", **end)).status.code == Code.OK
        assert bodies(await eu.receive()) == [b"half"]
        assert await us.receive() == []


async def test_a_recall_handle_of_another_namespace_recalls_nothing(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await prepared(at, "delay")
        eu, us = Tenant(at, "eu"), Tenant(at, "us")
        later = pb.SystemProperties(message_type=pb.DELAY)
        later.delivery_timestamp.GetCurrentTime()
        later.delivery_timestamp.seconds += 3_600
        entry = await eu.send(
            "late", message_type=pb.DELAY, delivery_timestamp=later.delivery_timestamp
        )
        recall = {"topic": pb.Resource(name="orders"), "recall_handle": entry.recall_handle}
        assert (await us.ask("RecallMessage", **recall)).status.code == Code.BAD_REQUEST
        assert (await eu.ask("RecallMessage", **recall)).status.code == Code.OK


async def test_pulls_and_offsets_are_those_of_the_namespace(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await prepared(at)
        eu, us = Tenant(at, "eu"), Tenant(at, "us")
        for number in range(8):
            await eu.send(f"m-{number}")
        results = []
        for queue_id in range(2):
            queue = pb.MessageQueue(topic=pb.Resource(name="orders"), id=queue_id)
            place: dict[str, Any] = {
                "group": pb.Resource(name="pullers"),
                "message_queue": queue,
            }
            request = service.PullMessageRequest(
                **place, batch_size=32, long_polling_timeout=Duration()
            )
            for tenant in (eu, us):
                parts = await tenant.parts("PullMessage", request, service.PullMessageResponse)
                got = [part.message for part in parts if part.HasField("message")]
                assert tenant is eu or not got
                results += got
            assert (await eu.ask("UpdateOffset", **place, offset=1)).status.code == Code.OK
            assert (await eu.ask("GetOffset", **place)).offset == 1
            missing = await us.ask("GetOffset", **place)
            assert missing.status.code == Code.OFFSET_NOT_FOUND
            policy = pb.QueryOffsetPolicy.END
            end = {"message_queue": queue, "query_offset_policy": policy}
            assert (await us.ask("QueryOffset", **end)).offset == 0
        assert len(results) == 8
        assert {result.topic.name for result in results} == {"orders"}


async def test_heartbeats_and_terminations_with_a_namespace_are_answered(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        group = pb.Resource(resource_namespace="eu", name="workers")
        eu = Tenant(at, "eu")
        beat = await eu.ask("Heartbeat", group=group, client_type=pb.PUSH_CONSUMER)
        assert beat.status.code == Code.OK
        assert (await eu.ask("NotifyClientTermination", group=group)).status.code == Code.OK


class Stream(AwaitedCall):
    """A Telemetry call."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        super().__init__()
        self.metadata = metadata
        self.answered = asyncio.Event()

    def send(self, message: bytes) -> None:
        super().send(message)
        self.answered.set()

    def commands(self) -> Iterator[service.TelemetryCommand]:
        return map(service.TelemetryCommand.FromString, self.sent)


def settings(**fields: Any) -> bytes:
    return service.TelemetryCommand(settings=pb.Settings(**fields)).SerializeToString()


def opened(at: House, stream: Stream) -> Callable[[bytes], None]:
    open_ = at.methods["Telemetry"].open
    assert open_ is not None
    return open_(stream).message


async def test_settings_come_back_with_short_names_and_the_groups_own_numbers(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        await prepared(at)
        group = admin_pb2.Group(name="eu%workers", max_attempts=7)
        await at.ask("AlterGroup", admin_pb2.AlterGroupRequest(group=group), admin_pb2.GroupReply)
        stream = Stream(Tenant(at, "eu").metadata)
        send_command = opened(at, stream)
        named = pb.Resource(resource_namespace="eu", name="workers")
        send_command(settings(subscription=pb.Subscription(group=named)))
        await stream.answered.wait()
        (answer,) = stream.commands()
        assert answer.settings.subscription.group == named
        assert answer.settings.backoff_policy.max_attempts == 7


async def test_a_check_of_a_half_message_goes_to_a_producer_of_its_namespace(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        await prepared(at, "transaction")
        streams = {}
        for name in ("us", "eu", ""):
            streams[name] = Stream(Tenant(at, name, f"{name}@1").metadata)
            opened(at, streams[name])
            topic = f"{name}%orders" if name else "orders"
            sender = Sender(f"{name}@1", host_of(streams[name].peer))
            at.proxy.telemetry.publishers.add_topic(sender, topic)
        publishers = at.proxy.telemetry.publishers
        assert publishers.topics() == {"orders", "eu%orders", "us%orders"}
        half = pb.Message(topic=pb.Resource(name="eu%orders"), body=b"half")
        command = service.TelemetryCommand(
            recover_orphaned_transaction_command=service.RecoverOrphanedTransactionCommand(
                message=half, transaction_id="t"
            )
        )
        assert publishers.send_command("eu%orders", command.SerializeToString())
        resources = {
            name: [
                command.recover_orphaned_transaction_command.message.topic
                for command in stream.commands()
                if command.HasField("recover_orphaned_transaction_command")
            ]
            for name, stream in streams.items()
        }
        named = pb.Resource(resource_namespace="eu", name="orders")
        assert resources == {"us": [], "eu": [named], "": []}


async def test_a_telemetry_stream_of_an_impossible_namespace_is_told_so_and_ended(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        stream = Stream(Tenant(at, "a%b").metadata)
        opened(at, stream)
        (answer,) = stream.commands()
        assert int(answer.status.code) == Code.BAD_REQUEST
        assert stream.status is GrpcStatus.OK
        refused = await Tenant(at, "a%b").ask("QueryRoute", topic=pb.Resource(name="orders"))
        assert refused.status.code == Code.BAD_REQUEST
