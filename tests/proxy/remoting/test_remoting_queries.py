"""What operators ask over Remoting: messages by key and id, the age of a queue, running info."""

from pathlib import Path

from proxy.houses import House, house
from proxy.remoting.client import RemotingClient, send_fields
from proxy.remoting.test_remoting_consumers import bodies, orders, until

from popmq.common.clock import SystemClock
from popmq.common.wire import admin_pb2
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.proxy import Proxy
from popmq.testing.harness.core_broker import SMALL

LONG_MAX = (1 << 63) - 1


async def store(at: House, body: bytes, broker: str = "a") -> None:
    properties = f"UNIQ_KEY\x01id-{body.decode()}\x02KEYS\x01order-1 {body.decode()}\x02"
    fields = send_fields("orders", properties, n=broker)
    assert (await RemotingClient(at.proxy).ask(310, fields, body)).code == 0


def query(key: str, *, by_id: bool = False, **more: object) -> dict[str, object]:
    plain: dict[str, object] = {
        "topic": "orders",
        "key": key,
        "maxNum": 32,
        "beginTimestamp": 0,
        "endTimestamp": LONG_MAX,
        "_UNIQUE_KEY_QUERY": by_id,
    }
    return {**plain, **more}


async def test_messages_are_found_by_key_and_by_id(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        for body in (b"one", b"two"):
            await store(at, body)
        client = RemotingClient(at.proxy)
        both = await client.ask(12, query("order-1"))
        assert both.fields.keys() == {"indexLastUpdateTimestamp", "indexLastUpdatePhyoffset"}
        assert {entry[0] for entry in bodies(both.body)} == {b"one", b"two"}
        (stored,) = bodies((await client.ask(12, query("id-two", by_id=True))).body)
        assert (stored[0], stored[1]["UNIQ_KEY"]) == (b"two", "id-two")
        assert (await client.ask(12, query("id-two", indexType="U"))).code == 0
        assert (await client.ask(12, query("two", maxNum=1))).code == 0
        viewed = await client.ask(33, {"offset": stored[3]})
        assert bodies(viewed.body)[0][0] == b"two"
        for nothing in (query("id-two"), query("one", by_id=True), query("one", endTimestamp=1)):
            assert (await client.ask(12, nothing)).code == 22
        tags = await client.ask(12, query("red", indexType="T"))
        assert (tags.code, "found by key (K) or id (U)" in tags.remark) == (3, True)


async def test_of_several_broker_groups_each_message_is_found_once(tmp_path: Path) -> None:
    async with house(tmp_path, "a", "b") as at:
        for name in "ab":
            await at.create_at(name, admin_pb2.Topic(name="orders", queues=1, type="normal"))
            await store(at, name.encode(), name)
        client = RemotingClient(at.proxy)
        for _ in range(2):  # a client sends a copy for each broker group of the route
            first, second = (
                await client.ask(12, query("order-1")),
                await client.ask(12, query("order-1")),
            )
            assert {entry[0] for entry in bodies(first.body)} == {b"a", b"b"}
            assert (second.code, second.body) == (22, b"")
        at_a_port = RemotingClient(at.proxy, broker_group="b")
        for _ in range(2):
            answer = await at_a_port.ask(12, query("order-1"))
            assert [entry[0] for entry in bodies(answer.body)] == [b"b"]


async def test_the_oldest_message_of_a_queue_says_since_when_there_are_messages(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        client, queue = RemotingClient(at.proxy), {"topic": "orders", "queueId": 0}
        before_ms = SystemClock().wall_ms()
        fields: dict[str, object] = {**queue}
        assert (await client.ask(32, fields)).fields == {"timestamp": "-1"}
        await store(at, b"one")
        await store(at, b"two")
        stored_ms = int((await client.ask(32, fields)).fields["timestamp"])
        assert before_ms - 1_000 <= stored_ms <= SystemClock().wall_ms() + 1_000
        wrong = {"topic": "orders", "queueId": 9}
        assert (await client.ask(32, dict(wrong))).code == 1


async def test_the_running_info_of_a_consumer_comes_from_itself_at_any_proxy(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        second = Proxy(SMALL, StaticBrokers(at.ports), SystemClock())
        second.remoting.start()
        consumer = RemotingClient(second, "me@1")
        await consumer.heartbeat()
        operator = RemotingClient(at.proxy)
        fields = {"consumerGroup": "readers", "clientId": "me@1", "jstackEnable": False}
        number = operator.send(307, dict(fields))
        await until(lambda: bool(consumer.pushed))
        (asked,) = consumer.pushed
        assert (asked.code, asked.fields["consumerGroup"]) == (307, "readers")
        consumer.respond(asked, body=b"{}")
        answer = await operator.answer(number)
        assert (answer.code, answer.body) == (0, b"{}")
        number = operator.send(307, dict(fields))
        await until(lambda: len(consumer.pushed) == 2)
        consumer.respond(consumer.pushed[1], code=1)
        refused = await operator.answer(number)
        assert (refused.code, "the client answered 1: I refuse" in refused.remark) == (1, True)
        absent = await operator.ask(307, {**fields, "clientId": "me@2"})
        assert (absent.code, "is not connected" in absent.remark) == (1, True)
        second.drain()
