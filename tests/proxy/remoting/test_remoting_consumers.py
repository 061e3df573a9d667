"""Remoting consumers over a real broker: pulls, offsets, members of groups, messages sent back."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from proxy.houses import House, house
from proxy.remoting.client import RemotingClient, send_fields

from popmq.common.clock import SystemClock
from popmq.common.errors import Code
from popmq.common.wire import admin_pb2
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.remoting.stored_message import parse_properties
from popmq.testing.harness.core_broker import SMALL

NOTICE = 40


def group(name: str, topic: str = "orders", expression: str = "*", **more: Any) -> dict[str, Any]:
    subscription = {"topic": topic, "subString": expression, "expressionType": "TAG"}
    plain = {"groupName": name, "messageModel": "CLUSTERING", "consumeType": "CONSUME_PASSIVELY"}
    return {**plain, "subscriptionDataSet": [{**subscription, **more}]}


def pull_fields(offset: int = 0, wait_ms: int = 0, **more: object) -> dict[str, object]:
    plain: dict[str, object] = {
        "consumerGroup": "readers",
        "topic": "orders",
        "queueId": 0,
        "queueOffset": offset,
        "maxMsgNums": 32,
        "sysFlag": 2 if wait_ms else 0,
        "commitOffset": 0,
        "suspendTimeoutMillis": wait_ms,
        "subVersion": 0,
    }
    return {**plain, **more}


def bodies(data: bytes) -> list[tuple[bytes, dict[str, str], int, int]]:
    """Body, properties, reconsume times and physical offset of each stored message."""
    received = []
    at = 0
    while at < len(data):
        size, physical, times, length = (
            *struct.unpack_from(">i", data, at),
            *struct.unpack_from(">q", data, at + 28),
            *struct.unpack_from(">i", data, at + 72),
            *struct.unpack_from(">i", data, at + 84),
        )
        body = data[at + 88 : at + 88 + length]
        topic_at = at + 88 + length
        text_at = topic_at + 1 + data[topic_at]
        (length,) = struct.unpack_from(">h", data, text_at)
        text = data[text_at + 2 : text_at + 2 + length].decode()
        received.append((body, parse_properties(text), times, physical))
        at += size
    return received


@asynccontextmanager
async def orders(folder: Path, queues: int = 1) -> AsyncIterator[House]:
    async with house(folder, "a") as at:
        topic = admin_pb2.Topic(name="orders", queues=queues, type="normal")
        assert (await at.change_topic("CreateTopic", topic))[0] == Code.OK
        at.proxy.remoting.start()
        yield at
        at.proxy.drain()


async def send(at: House, body: bytes, tag: str = "red") -> None:
    client = RemotingClient(at.proxy)
    properties = f"UNIQ_KEY\x01id-{body.decode()}\x02TAGS\x01{tag}\x02size\x019\x02"
    assert (await client.ask(310, send_fields("orders", properties, h=7), body)).code == 0


async def joined(proxy: Proxy, client_id: str, **more: Any) -> RemotingClient:
    client = RemotingClient(proxy, client_id)
    assert (await client.heartbeat(group("readers", **more))).code == 0
    return client


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not met():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.02)


async def until_members(client: RemotingClient, *expected: str) -> None:
    """Until the list is known and has these."""
    async with asyncio.timeout(20):
        received: list[str] = []
        while received != list(expected):
            await asyncio.sleep(0.02)
            answer = await client.ask(38, {"consumerGroup": "readers"})
            received = [] if answer.code else json.loads(answer.body)["consumerIdList"]


async def test_a_pull_gets_messages_with_their_properties_and_the_bounds_of_the_queue(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        await send(at, b"one")
        await send(at, b"two", tag="blue")
        client = await joined(at.proxy, "me@1")
        answer = await client.ask(11, pull_fields())
        assert answer.code == 0
        bounds = [answer.fields[name] for name in ("nextBeginOffset", "minOffset", "maxOffset")]
        assert bounds == ["2", "0", "2"]
        (row, two) = bodies(answer.body)
        expected = {"UNIQ_KEY": "id-one", "TAGS": "red", "CLUSTER": "popmq", "size": "9"}
        assert row[:3] == (b"one", expected, 0)
        assert two[0] == b"two"


async def test_the_filter_of_a_client_is_its_own_heartbeats_or_that_of_its_pull(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        await send(at, b"one")
        await send(at, b"two", tag="blue")
        client = await joined(at.proxy, "me@1", expression="blue")
        other = await joined(at.proxy, "me@2", expression="red || green")
        assert [row[0] for row in bodies((await client.ask(11, pull_fields())).body)] == [b"two"]
        assert [row[0] for row in bodies((await other.ask(11, pull_fields())).body)] == [b"one"]
        own = pull_fields(sysFlag=4, subscription="red", expressionType="TAG")
        assert [row[0] for row in bodies((await client.ask(361, own)).body)] == [b"one"]
        # The field without its flag means nothing: clients in Go send it empty.
        empty = pull_fields(subscription="")
        assert [row[0] for row in bodies((await client.ask(11, empty)).body)] == [b"two"]


async def test_a_pull_before_the_first_heartbeat_is_asked_to_come_again(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        assert (await RemotingClient(at.proxy).ask(11, pull_fields())).code == 25


async def test_a_held_pull_is_answered_by_a_message_and_holds_up_nothing_else(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        client = await joined(at.proxy, "me@1")
        held = client.send(11, pull_fields(wait_ms=20_000))
        assert (await client.ask(31, {"topic": "orders", "queueId": 0})).fields == {"offset": "0"}
        assert client.answered() == 0
        await send(at, b"one")
        answer = await client.answer(held)
        assert [row[0] for row in bodies(answer.body)] == [b"one"]


async def test_a_pull_that_finds_nothing_says_whether_it_has_moved(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        client = await joined(at.proxy, "me@1", expression="blue")
        answer = await client.ask(11, pull_fields())
        assert (answer.code, answer.fields["nextBeginOffset"]) == (19, "0")
        await send(at, b"one")
        answer = await client.ask(11, pull_fields())
        assert (answer.code, answer.fields["nextBeginOffset"]) == (20, "1")
        answer = await client.ask(11, pull_fields(offset=9))
        assert (answer.code, answer.fields["nextBeginOffset"]) == (21, "1")


async def test_a_proxy_that_drains_answers_its_held_pulls(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        client = await joined(at.proxy, "me@1")
        held = client.send(11, pull_fields(wait_ms=20_000))
        at.proxy.drain()
        answer = await client.answer(held)
        assert (answer.code, answer.fields["nextBeginOffset"]) == (19, "0")


async def test_an_offset_is_kept_and_a_group_without_one_begins_at_the_first_message(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        client = await joined(at.proxy, "me@1")
        await send(at, b"one")
        place: dict[str, object] = {"consumerGroup": "readers", "topic": "orders", "queueId": 0}
        assert (await client.ask(14, place)).fields == {"offset": "0"}
        client.one_way(15, {**place, "commitOffset": 1})
        assert (await client.ask(15, {**place, "commitOffset": 1})).code == 0
        assert (await client.ask(14, place)).fields == {"offset": "1"}
        assert client.answered() == 0
        assert (await client.ask(15, {**place, "commitOffset": 7})).code == 1


async def test_a_consumer_goes_on_where_a_reset_puts_its_group_and_cannot_undo_it(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        client = await joined(at.proxy, "me@1")
        for body in (b"one", b"two"):
            await send(at, body)
        place: dict[str, object] = {"consumerGroup": "readers", "topic": "orders", "queueId": 0}
        assert (await client.ask(15, {**place, "commitOffset": 2})).code == 0
        held = client.send(11, pull_fields(offset=2, wait_ms=20_000))
        assert (await client.ask(14, place)).fields == {"offset": "2"}
        assert client.answered() == 0
        request = admin_pb2.ResetOffsetRequest(topic="orders", group="readers", oldest=True)
        await at.ask("ResetOffset", request, admin_pb2.ResetOffsetReply)
        answer = await client.answer(held)
        assert (answer.code, answer.fields["nextBeginOffset"]) == (21, "0")
        assert (await client.ask(15, {**place, "commitOffset": 2})).code == 0
        assert (await client.ask(14, place)).fields == {"offset": "0"}
        answer = await client.ask(11, pull_fields())
        assert [row[0] for row in bodies(answer.body)] == [b"one", b"two"]
        for written, kept in ((2, "2"), (1, "2")):
            assert (await client.ask(15, {**place, "commitOffset": written})).code == 0
            assert (await client.ask(14, place)).fields == {"offset": kept}


async def test_the_offsets_of_a_queue_are_its_first_its_end_and_that_of_a_time(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        await send(at, b"one")
        client = RemotingClient(at.proxy)
        queue: dict[str, object] = {"topic": "orders", "queueId": 0}
        assert (await client.ask(30, queue)).fields == {"offset": "1"}
        assert (await client.ask(31, queue)).fields == {"offset": "0"}
        assert (await client.ask(29, {**queue, "timestamp": 0})).fields == {"offset": "0"}
        assert (await client.ask(29, {**queue, "timestamp": 1 << 45})).fields == {"offset": "1"}
        assert (await client.ask(30, {**queue, "queueId": 9})).code == 1


@pytest.mark.more
async def test_all_members_of_a_group_are_the_same_at_every_proxy_and_hear_of_changes(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        second = Proxy(SMALL, StaticBrokers(at.ports), SystemClock())
        second.remoting.start()
        row = await joined(at.proxy, "me@1")
        await until_members(row, "me@1")
        two = await joined(second, "me@2")
        await until_members(row, "me@1", "me@2")
        await until_members(two, "me@1", "me@2")
        await until(lambda: len(row.pushed) >= 2)  # at most one a second
        notices = [command for command in row.pushed if command.code == NOTICE]
        assert {command.fields["consumerGroup"] for command in notices} == {"readers"}
        assert all(command.is_one_way for command in notices)
        two.connection.lost()  # a client in Go has no other way to leave
        await until_members(row, "me@1")
        second.drain()


@pytest.mark.more
async def test_a_client_leaves_by_saying_so_and_by_a_heartbeat_without_the_group(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        row, two, three = [await joined(at.proxy, f"me@{number}") for number in (1, 2, 3)]
        await until_members(row, "me@1", "me@2", "me@3")
        await two.ask(35, {"clientID": "me@2", "consumerGroup": "readers"})
        await until_members(row, "me@1", "me@3")
        await three.heartbeat()
        await until_members(row, "me@1")


@pytest.mark.more
async def test_a_list_never_lacks_the_one_that_asks(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        row = await joined(at.proxy, "me@1")
        await until_members(row, "me@1")
        stranger = RemotingClient(at.proxy, "me@2")
        answer = await stranger.ask(38, {"consumerGroup": "readers"})
        assert (answer.code, answer.body) == (14, b"")
        assert "not known for sure" in answer.remark


@pytest.mark.more
async def test_a_consumer_that_has_just_joined_waits_for_a_list_with_itself(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        row = await joined(at.proxy, "me@1")
        await until_members(row, "me@1")
        second = Proxy(SMALL, StaticBrokers(at.ports), SystemClock())
        two = await joined(second, "me@2")
        asked = two.send(38, {"consumerGroup": "readers"})
        second.remoting.start()  # asks the owner from now on
        answer = await two.answer(asked)
        assert json.loads(answer.body) == {"consumerIdList": ["me@1", "me@2"]}
        second.drain()


@pytest.mark.more
async def test_a_broadcasting_consumer_is_no_member(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        row = await joined(at.proxy, "me@1")
        other = RemotingClient(at.proxy, "me@2")
        await other.heartbeat({**group("readers"), "messageModel": "BROADCASTING"})
        assert (await other.ask(11, pull_fields())).code == 19
        await until_members(row, "me@1")


async def test_the_retry_topic_of_a_group_has_a_route_and_a_queue_before_the_first_retry(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        client = await joined(at.proxy, "me@1")
        route = json.loads((await client.ask(105, {"topic": "%RETRY%readers"})).body)
        assert [row["readQueueNums"] for row in route["queueDatas"]] == [1]
        place: dict[str, Any] = {"topic": "%RETRY%readers", "queueId": 0}
        assert (await client.ask(14, {**place, "consumerGroup": "readers"})).code == 0
        assert (await client.ask(11, pull_fields(**place))).code == 19
        other = pull_fields(**place, consumerGroup="others")
        answer = await client.ask(11, other)
        assert answer.code == 13
        assert "is read by group readers only" in answer.remark


async def test_a_message_that_is_sent_back_comes_again_and_at_last_becomes_a_dead_letter(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        await send(at, b"bad")
        client = await joined(at.proxy, "me@1")
        (first,) = bodies((await client.ask(11, pull_fields())).body)
        back: dict[str, object] = {"group": "readers", "delayLevel": 1, "maxReconsumeTimes": 1}
        assert (await client.ask(36, {**back, "offset": first[3]})).code == 0
        again = pull_fields(wait_ms=20_000, topic="%RETRY%readers")
        (second,) = bodies((await client.ask(11, again)).body)
        assert (second[0], second[2]) == (b"bad", 1)
        properties = second[1]
        names = ("RETRY_TOPIC", "ORIGIN_MESSAGE_ID", "UNIQ_KEY", "size")
        assert [properties[name] for name in names] == ["orders", "id-bad", "id-bad", "9"]
        assert (await client.ask(36, {**back, "offset": second[3]})).code == 0
        request = admin_pb2.ListDeadLettersRequest(group="readers", limit=10)
        reply = await at.ask("ListDeadLetters", request, admin_pb2.ListDeadLettersReply)
        letters = [(row.origin_topic, row.attempts) for row in reply.letters]
        assert letters == [("orders", 2)]
        redrive = admin_pb2.RedriveRequest(group="readers", limit=10)
        await at.ask("Redrive", redrive, admin_pb2.RedriveReply)
        next_one = pull_fields(offset=1, wait_ms=20_000, topic="%RETRY%readers")
        (third,) = bodies((await client.ask(11, next_one)).body)
        assert (third[0], third[2]) == (b"bad", 0)
        assert third[1]["RETRY_TOPIC"] == "orders"


async def test_a_message_that_is_sent_back_twice_comes_again_once(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        for body in (b"bad", b"worse"):
            await send(at, body)
        client, other = await joined(at.proxy, "me@1"), await joined(at.proxy, "other@1")
        first, second = bodies((await client.ask(11, pull_fields())).body)
        back: dict[str, object] = {"group": "readers", "delayLevel": 1, "offset": first[3]}
        for asker in (client, client, other):
            assert (await asker.ask(36, back)).code == 0
        assert (await client.ask(36, {**back, "offset": second[3]})).code == 0
        again = pull_fields(wait_ms=20_000, topic="%RETRY%readers")
        got = [row[0] for row in bodies((await client.ask(11, again)).body)]
        if len(got) == 1:
            more = pull_fields(offset=1, wait_ms=20_000, topic="%RETRY%readers")
            got += [row[0] for row in bodies((await client.ask(11, more)).body)]
        assert got == [b"bad", b"worse"]
        dead: dict[str, object] = {**back, "maxReconsumeTimes": 0}
        for _ in range(2):
            assert (await client.ask(36, {**dead, "group": "others"})).code == 0
        request = admin_pb2.ListDeadLettersRequest(group="others", limit=10)
        reply = await at.ask("ListDeadLetters", request, admin_pb2.ListDeadLettersReply)
        assert len(reply.letters) == 1
        assert (await client.ask(36, back)).code == 0, "it has come again and may fail again"
        third = pull_fields(offset=2, wait_ms=20_000, topic="%RETRY%readers")
        assert [row[0] for row in bodies((await client.ask(11, third)).body)] == [b"bad"]


async def test_a_message_that_a_client_sends_to_its_retry_topic_itself_comes_again(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        client = await joined(at.proxy, "me@1")
        properties = "UNIQ_KEY\x01id-1\x02RETRY_TOPIC\x01orders\x02DELAY\x011\x02"
        fields = send_fields("%RETRY%readers", properties, j=2, l=16)
        answer = await client.ask(310, fields, b"body")
        assert (answer.code, answer.fields["queueId"]) == (0, "0"), answer.remark
        again = pull_fields(wait_ms=20_000, topic="%RETRY%readers")
        (second,) = bodies((await client.ask(11, again)).body)
        assert (second[0], second[2]) == (b"body", 2)
        fields = send_fields("%RETRY%readers", properties, j=17, l=16)
        assert (await client.ask(310, fields, b"dead")).code == 0
        request = admin_pb2.ListDeadLettersRequest(group="readers", limit=10)
        reply = await at.ask("ListDeadLetters", request, admin_pb2.ListDeadLettersReply)
        assert [row.attempts for row in reply.letters] == [17]


async def test_a_number_that_names_no_message_is_refused(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        await send(at, b"one")
        client = await joined(at.proxy, "me@1")
        (first,) = bodies((await client.ask(11, pull_fields())).body)
        (received,) = bodies((await client.ask(33, {"offset": first[3]})).body)
        assert received[0] == b"one"
        for offset in (-1, 0, first[3] + 1, 1 << 62):
            answer = await client.ask(33, {"offset": offset})
            assert (answer.code, answer.body) == (1, b"")
            back = {"group": "readers", "delayLevel": 0, "offset": offset}
            assert (await client.ask(36, back)).code == 1


async def test_a_wrong_filter_is_refused_when_the_consumer_starts(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        client = RemotingClient(at.proxy)
        for expression, code in (("a LIKE", 23), ("a > 1", 0)):
            subscribed = {"topic": "orders", "subString": expression, "expressionType": "SQL92"}
            content = {"clientId": "me@1", "group": "readers", "subscriptionData": subscribed}
            answer = await client.ask(46, body=json.dumps(content).encode())
            assert answer.code == code


def lock_body(client_id: str, *queues: int, broker: str = "a") -> bytes:
    places = [{"topic": "orders", "brokerName": broker, "queueId": queue} for queue in queues]
    content = {"consumerGroup": "readers", "clientId": client_id, "mqSet": places}
    return json.dumps({**content, "onlyThisBroker": False}).encode()


async def locked(client: RemotingClient, body: bytes) -> list[int]:
    answer = await client.ask(41, body=body)
    assert answer.code == 0, answer.remark
    return sorted(row["queueId"] for row in json.loads(answer.body)["lockOKMQSet"])


async def test_a_queue_is_locked_by_one_consumer_until_it_unlocks_it(tmp_path: Path) -> None:
    async with orders(tmp_path, queues=2) as at:
        row, two = [await joined(at.proxy, f"me@{number}") for number in (1, 2)]
        assert await locked(row, lock_body("me@1", 0)) == [0]
        assert await locked(two, lock_body("me@2", 0, 1)) == [1]
        row.connection.lost()  # it may come back: the lease stays
        assert await locked(two, lock_body("me@2", 0, 1)) == [1]
        again = RemotingClient(at.proxy, "me@1")
        assert await locked(again, lock_body("me@1", 0)) == [0]
        again.one_way(42, {}, lock_body("me@1", 0))
        assert await locked(two, lock_body("me@2", 0, 1)) == [0, 1]


async def test_a_queue_of_a_broker_group_that_cannot_be_asked_is_not_locked(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        client = await joined(at.proxy, "me@1")
        assert await locked(client, lock_body("me@1", 0, broker="other")) == []
        for body in (b"{}", b'{"consumerGroup": "g", "clientId": "c", "mqSet": [7]}'):
            assert (await client.ask(41, body=body)).code != 0


async def test_a_group_that_processes_in_order_makes_dead_letters_of_what_it_gives_up(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        client = await joined(at.proxy, "me@1")
        assert await locked(client, lock_body("me@1", 0)) == [0]
        properties = "UNIQ_KEY\x01id-1\x02RETRY_TOPIC\x01orders\x02"
        fields = send_fields("%RETRY%readers", properties, j=2, l=2)
        assert (await client.ask(310, fields, b"dead")).code == 0
        request = admin_pb2.ListDeadLettersRequest(group="readers", limit=10)
        reply = await at.ask("ListDeadLetters", request, admin_pb2.ListDeadLettersReply)
        assert [row.attempts for row in reply.letters] == [2]


async def test_a_delayed_message_is_recalled_by_the_handle_of_its_send(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        topic = admin_pb2.Topic(name="later", queues=1, type="delay")
        assert (await at.change_topic("CreateTopic", topic))[0] == Code.OK
        client = RemotingClient(at.proxy)
        fields = send_fields("later", "UNIQ_KEY\x01id-1\x02TIMER_DELAY_SEC\x013600\x02")
        handle = (await client.ask(310, fields, b"body")).fields["recallHandle"]
        recall: dict[str, object] = {"topic": "later", "recallHandle": handle}
        answer = await client.ask(370, recall)
        assert (answer.code, answer.fields) == (0, {"msgId": "id-1"})
        answer = await client.ask(370, {**recall, "recallHandle": "x"})
        assert (answer.code, answer.fields) == (1, {})


async def listed(at: House) -> list[admin_pb2.ConnectedClient]:
    at.proxy.clients.report()
    request = admin_pb2.ListClientsRequest()
    reply = await at.ask("ListClients", request, admin_pb2.ListClientsReply)
    return list(reply.clients)


async def test_a_remoting_client_is_listed_until_its_last_connection_ends(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        first = await joined(at.proxy, "10.0.0.9@1", expression="eu")
        again = await joined(at.proxy, "10.0.0.9@1", expression="eu")
        (client,) = await listed(at)
        assert (client.client_id, client.protocol) == ("10.0.0.9@1", "remoting")
        assert (client.language, client.version, client.kind) == ("JAVA", "5.5.0", "push consumer")
        (group,) = client.groups
        subscribed = [(entry.topic, entry.filter) for entry in group.subscriptions]
        assert (group.name, subscribed) == ("readers", [("orders", "eu")])
        assert client.connections[0].address == "10.0.0.9:999"
        first.connection.lost()
        assert len(await listed(at)) == 1
        again.connection.lost()
        assert await listed(at) == []


async def test_the_kind_of_a_remoting_client_is_what_its_heartbeat_has(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        client = RemotingClient(at.proxy, "me@1")
        pulls = {**group("pullers"), "consumeType": "CONSUME_ACTIVELY"}

        async def kind(producer: str, *groups: dict[str, Any]) -> str:
            content = {"clientID": "me@1", "consumerDataSet": groups}
            producers = [{"groupName": producer}]
            body = json.dumps({**content, "producerDataSet": producers}).encode()
            assert (await client.ask(34, body=body)).code == 0
            (listed_client,) = await listed(at)
            return listed_client.kind

        assert await kind("makers") == "producer"
        assert await kind("CLIENT_INNER_PRODUCER", group("readers")) == "push consumer"
        assert await kind("makers", pulls, group("a")) == "producer, pull consumer, push consumer"
