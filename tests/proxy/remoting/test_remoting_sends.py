"""Remoting sends and routes over a real broker, seen again by gRPC receives."""

import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from proxy.houses import House, house
from proxy.remoting.client import RemotingClient, batch_member, send_fields

from popmq.common.errors import Code
from popmq.common.settings.settings import RemotingSettings
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.testing.harness.core_broker import SMALL

PROPERTIES = "UNIQ_KEY\x01id-1\x02KEYS\x01a b\x02TAGS\x01red\x02size\x019\x02WAIT\x01true\x02"


async def create(at: House, name: str, kind: str, queues: int = 2) -> None:
    topic = admin_pb2.Topic(name=name, queues=queues, type=kind)
    assert (await at.change_topic("CreateTopic", topic))[0] == Code.OK


def addresses_in(route: bytes) -> dict[str, dict[str, str]]:
    brokers = json.loads(route)["brokerDatas"]
    return {broker["brokerName"]: broker["brokerAddrs"] for broker in brokers}


async def received(at: House, topic: str) -> list[pb.Message]:
    request = service.ReceiveMessageRequest(
        group=pb.Resource(name="workers"),
        message_queue=pb.MessageQueue(topic=pb.Resource(name=topic)),
        invisible_duration=Duration(seconds=600),
        long_polling_timeout=Duration(),
    )
    return await at.receive(request)


async def test_a_route_names_every_broker_group_with_the_address_that_the_client_reached(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a", "b") as at:
        await at.create_at("a", admin_pb2.Topic(name="orders", queues=3, type="normal"))
        answer = await RemotingClient(at.proxy).ask(105, {"topic": "orders"})
        assert answer.code == 0
        route = json.loads(answer.body)
        assert addresses_in(answer.body) == {name: {"0": "127.0.0.1:8081"} for name in "ab"}
        queues = [
            (queue_data["brokerName"], queue_data["readQueueNums"], queue_data["perm"])
            for queue_data in route["queueDatas"]
        ]
        assert queues == [("a", 3, 6), ("b", 3, 6)]


@pytest.mark.parametrize(("language", "version"), [("GO", 317), ("CPP", 121), ("JAVA", 399)])
async def test_a_client_that_cannot_name_a_broker_group_gets_no_route_to_some_of_several(
    tmp_path: Path, language: str, version: int
) -> None:
    async with house(tmp_path, "a", "b") as at:
        await at.create_at("a", admin_pb2.Topic(name="orders", queues=3, type="normal"))
        client = RemotingClient(at.proxy)
        answer = await client.ask(105, {"topic": "orders"}, language=language, version=version)
        assert (answer.code, answer.body) == (1, b"")
        assert "cannot name a broker group, and there are 2" in answer.remark
        assert "no port stands for a, b (remoting.group_ports)" in answer.remark


async def test_a_client_that_cannot_name_a_broker_group_gets_the_port_of_each(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a", "b") as at:
        for name in "ab":
            await at.create_at(name, admin_pb2.Topic(name="orders", queues=1, type="normal"))
        ports = RemotingSettings(advertise="host:9080", group_ports=("a:9081", "b:9082"))
        proxy = House(at.ports, replace(SMALL, remoting=ports)).proxy
        client = RemotingClient(proxy)
        old = await client.ask(105, {"topic": "orders"}, language="GO", version=317)
        new = await client.ask(105, {"topic": "orders"}, language="GO", version=318)
        assert addresses_in(old.body) == {"a": {"0": "host:9081"}, "b": {"0": "host:9082"}}
        assert addresses_in(new.body) == {name: {"0": "host:9080"} for name in "ab"}
        unnamed = await RemotingClient(proxy).ask(310, send_fields("orders"), b"lost")
        assert (unnamed.code, "remoting.group_ports" in unnamed.remark) == (15, True)
        for name in "ab":
            client = RemotingClient(proxy, broker_group=name)
            assert (await client.ask(310, send_fields("orders"), name.encode())).code == 0
            offset = await client.ask(30, {"topic": "orders", "queueId": 0})
            assert offset.fields == {"offset": "1"}
        # A client that names its broker group is served at any port.
        other = {"topic": "orders", "queueId": 0, "bname": "a"}
        assert (await client.ask(30, other)).fields == {"offset": "1"}


@pytest.mark.parametrize("topic", ["nothing", "TBW102"])
async def test_a_topic_that_does_not_exist_has_no_route(tmp_path: Path, topic: str) -> None:
    async with house(tmp_path, "a") as at:
        assert (await RemotingClient(at.proxy).ask(105, {"topic": topic})).code == 17


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (17, "(UPDATE_AND_CREATE_TOPIC): use popmq topic create or popmq topic alter"),
        (208, "(GET_CONSUME_STATS): use popmq lag"),
        (40, "(NOTIFY_CONSUMER_IDS_CHANGED): a server sends it to its clients"),
        (103, "(REGISTER_BROKER): RocketMQ's servers send it to each other;"),
        (4711, "(docs/reference/remoting.md)"),
    ],
)
async def test_a_code_that_is_not_served_is_refused_with_what_to_use_instead(
    tmp_path: Path, code: int, sentence: str
) -> None:
    async with house(tmp_path, "a") as at:
        answer = await RemotingClient(at.proxy).ask(code)
        assert (answer.code, answer.is_response) == (3, True)
        assert f"popmq does not serve request code {code} {sentence}" in answer.remark


async def test_a_message_goes_into_the_queue_that_its_client_names(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await create(at, "orders", "normal", queues=4)
        client = RemotingClient(at.proxy)
        fields = send_fields("orders", PROPERTIES, e=3, h=7, n="a")
        for offset in range(2):  # the same message object again
            answer = await client.ask(310, fields, b"body")
            codes = (answer.code, answer.fields["queueId"], answer.fields["queueOffset"])
            assert codes == (0, "3", str(offset)), answer.remark
            assert len(answer.fields["msgId"]) == 32
        messages = await received(at, "orders")
        assert [message.body for message in messages] == [b"body"] * 2
        system = messages[0].system_properties
        assert (system.message_id, system.tag, system.queue_id) == ("id-1", "red", 3)
        assert list(system.keys) == ["a", "b"]
        assert dict(messages[0].user_properties) == {"size": "9"}


async def test_the_long_names_of_an_old_send_mean_the_same(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await create(at, "orders", "normal")
        fields = {"topic": "orders", "queueId": 1, "sysFlag": 0, "bornTimestamp": 1, "flag": 0}
        answer = await RemotingClient(at.proxy).ask(
            10, {**fields, "properties": PROPERTIES}, b"body", language="GO", version=317
        )
        assert (answer.code, answer.fields["queueId"]) == (0, "1")


async def test_a_message_without_an_id_gets_one(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await create(at, "orders", "normal")
        await RemotingClient(at.proxy).ask(310, send_fields("orders"), b"body")
        (message,) = await received(at, "orders")
        assert len(message.system_properties.message_id) == 32


async def test_a_batch_is_stored_in_one_queue_in_its_order(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await create(at, "orders", "normal")
        body = b"".join(batch_member(b"%d" % n, f"UNIQ_KEY\x01id-{n}\x02") for n in range(3))
        answer = await RemotingClient(at.proxy).ask(320, send_fields("orders", e=1, m=True), body)
        assert (answer.code, answer.fields["queueOffset"]) == (0, "0"), answer.remark
        assert answer.fields["msgId"].count(",") == 2
        assert [message.body for message in await received(at, "orders")] == [b"0", b"1", b"2"]


async def test_a_one_way_send_is_stored_and_not_answered(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await create(at, "orders", "normal")
        client = RemotingClient(at.proxy)
        client.one_way(310, send_fields("orders"), b"one-way")
        client.one_way(310, send_fields("nothing"), b"to no topic")
        await client.ask(310, send_fields("orders"), b"after it")
        assert client.answered() == 0
        bodies = [message.body for message in await received(at, "orders")]
        assert bodies == [b"one-way", b"after it"]


async def test_a_compressed_body_is_stored_as_it_was(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await create(at, "orders", "normal")
        client = RemotingClient(at.proxy)
        for sys_flag in (1, 0x301):
            answer = await client.ask(310, send_fields("orders", f=sys_flag), zlib.compress(b"xy"))
            assert answer.code == 0, answer.remark
        message = await received(at, "orders")
        assert [(item.body, item.system_properties.body_encoding) for item in message] == [
            (b"xy", pb.Encoding.IDENTITY)
        ] * 2


BAD_BODIES = [
    (1, b"no zlib", "no zlib data"),
    (1, zlib.compress(b"xy")[:-5], "ends early"),
    (1, zlib.compress(bytes(64 << 20)), "message.max_body_bytes"),
    (0x201, b"x", "compressed with ZSTD"),
    (0, b"", "the message body is empty"),
]


async def test_a_body_that_cannot_be_stored_is_illegal(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await create(at, "orders", "normal")
        client = RemotingClient(at.proxy)
        for sys_flag, body, why in BAD_BODIES:
            answer = await client.ask(310, send_fields("orders", f=sys_flag), body)
            assert answer.code == 13
            assert why in answer.remark


@pytest.mark.parametrize(
    "properties",
    ["DELAY\x012\x02", "TIMER_DELAY_MS\x015000\x02", "TIMER_DELIVER_MS\x019999999999999\x02"],
)
async def test_delay_levels_and_times_delay(tmp_path: Path, properties: str) -> None:
    async with house(tmp_path, "a") as at:
        await create(at, "later", "delay")
        fields = send_fields("later", properties)
        answer = await RemotingClient(at.proxy).ask(310, fields, b"body")
        if "DELIVER" in properties:
            assert answer.code == 13
            assert "timer.max_delay_ms" in answer.remark
            return
        assert answer.code == 0, answer.remark
        assert answer.fields["recallHandle"]
        assert await received(at, "later") == []


async def test_a_fifo_topic_takes_messages_that_name_their_queue(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await create(at, "steps", "fifo")
        answer = await RemotingClient(at.proxy).ask(310, send_fields("steps", e=1), b"body")
        assert (answer.code, answer.fields["queueId"]) == (0, "1")


BAD_SENDS: list[tuple[dict[str, object], int, str]] = [
    (send_fields("orders", e=9), 1, "queue 9 of topic orders, which has 2"),
    (send_fields("orders", "DELAY\x011\x02"), 13, "takes NORMAL messages"),
    (send_fields("orders", "DELAY\x01x\x02"), 13, "no whole number"),
    (send_fields("orders", "TRAN_MSG\x01true\x02"), 13, "takes NORMAL messages"),
    (send_fields("nothing"), 17, "nothing"),
    (send_fields("%DLQ%group"), 13, "cannot be created or sent to"),
    (send_fields("orders", n="a b"), 1, "no name of a broker group"),
    (send_fields("orders", n="c"), 14, "is not known now"),
    (send_fields("orders", e="x"), 1, "not a number"),
    ({"b": "orders"}, 1, "lacks the field 'e'"),
]


async def test_a_send_that_cannot_be_served_is_refused_with_a_sentence(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await create(at, "orders", "normal")
        client = RemotingClient(at.proxy)
        for fields, code, why in BAD_SENDS:
            answer = await client.ask(310, fields, b"body")
            assert answer.code == code, answer.remark
            assert why in answer.remark


async def test_a_send_to_one_of_several_broker_groups_has_to_name_it(tmp_path: Path) -> None:
    async with house(tmp_path, "a", "b") as at:
        await at.create_at("a", admin_pb2.Topic(name="orders", queues=2, type="normal"))
        answer = await RemotingClient(at.proxy).ask(310, send_fields("orders"), b"body")
        assert answer.code == 15
        assert "names no broker group and there are 2" in answer.remark


async def test_a_connection_that_breaks_the_protocol_is_closed_and_the_others_are_not(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        bad, good = RemotingClient(at.proxy), RemotingClient(at.proxy)
        bad.write(b"\0\xff\xff\xff" + b"\0\xff\xff\xff")
        assert bad.connection.done
        assert not good.connection.done
        assert (await good.ask(105, {"topic": "nothing"})).code == 17


async def test_a_connection_without_a_whole_frame_or_without_a_word_is_closed(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        silent, half, idle = (RemotingClient(at.proxy) for _ in range(3))
        began_ms = silent.connection.now_ms
        half.tick(began_ms)
        idle.tick(began_ms)
        await half.ask(4711)
        half.write(b"\0\0\0")
        await idle.ask(4711)
        for client, last_ms in ((silent, 10_000), (half, 60_000), (idle, 120_000)):
            client.tick(began_ms + last_ms)
            assert not client.connection.done
            client.tick(began_ms + last_ms + 1)
            assert client.connection.done


async def test_a_connection_that_drains_sends_later_clients_away_and_answers_the_others(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        client = RemotingClient(at.proxy)
        client.connection.drain("the server stops")
        assert (await client.ask(4711)).code == 1500
        assert (await client.ask(4711, version=409)).code == 3
        assert client.connection.done


async def test_a_heartbeat_without_a_client_is_refused(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        client = RemotingClient(at.proxy)
        for body in (b"", b"[]", b"{}", b'{"clientID": 7}'):
            assert (await client.ask(34, body=body)).code == 1
        answer = await RemotingClient(at.proxy, "me@1").heartbeat()
        assert (answer.code, answer.version >= 232) == (0, True)
