"""Pop over Remoting: receives, acks and changes, and the assignment that makes a client pop."""

import json
from pathlib import Path

import pytest
from proxy.houses import House, house
from proxy.remoting.client import RemotingClient, send_fields
from proxy.remoting.test_remoting_consumers import (
    bodies,
    group,
    joined,
    orders,
    send,
    until,
    until_members,
)

from popmq.common.wire import admin_pb2
from popmq.proxy.remoting.assignments import share

FOUND, NO_MESSAGE, NOTHING = 0, 208, 210


def pop_fields(wait_ms: int = 0, **more: object) -> dict[str, object]:
    plain: dict[str, object] = {
        "consumerGroup": "readers",
        "topic": "orders",
        "queueId": -1,
        "maxMsgNums": 32,
        "invisibleTime": 60_000,
        "pollTime": wait_ms,
        "bornTime": 1_000_000,
        "initMode": 0,
        "expType": "TAG",
        "exp": "*",
        "order": False,
    }
    return {**plain, **more}


def delivery_fields(words: str, **more: object) -> dict[str, object]:
    """As a client makes them from the property of its message."""
    parts = words.split(" ")
    plain: dict[str, object] = {
        "consumerGroup": "readers",
        "topic": "orders",
        "queueId": parts[6],
        "offset": parts[7],
        "extraInfo": words,
    }
    return {**plain, **more}


async def popped(client: RemotingClient, **more: object) -> list[tuple[bytes, str, int]]:
    """Body, words and reconsume times of each message."""
    answer = await client.ask(200050, {**pop_fields(), **more})
    assert answer.code in (FOUND, NOTHING), answer.remark
    return [
        (body, properties["POP_CK"], times) for body, properties, times, _ in bodies(answer.body)
    ]


async def test_a_popped_message_has_what_its_client_needs_and_is_over_when_it_is_acked(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path, queues=2) as at:
        await send(at, b"one")
        client = await joined(at.proxy, "me@1")
        answer = await client.ask(200050, pop_fields())
        assert (answer.code, answer.fields["invisibleTime"]) == (FOUND, "60000")
        # By the clock of the client, whose time was 1,000,000 when it asked.
        pop_time = int(answer.fields["popTime"])
        assert 1_000_000 <= pop_time < 1_020_000
        starts, offsets = answer.fields["startOffsetInfo"], answer.fields["msgOffsetInfo"]
        assert (starts, offsets) == ("0 0 0", "0 0 0")
        ((body, properties, times, _),) = bodies(answer.body)
        assert (body, times, properties["UNIQ_KEY"]) == (b"one", 0, "id-one")
        words = properties["POP_CK"].split(" ")
        assert words[:8] == ["0", str(pop_time), "60000", "0", "0", "a", "0", "0"]
        acked = await client.ask(200051, delivery_fields(properties["POP_CK"]))
        assert acked.code == 0
        again = await client.ask(200051, delivery_fields(properties["POP_CK"]))
        assert again.code in (0, NO_MESSAGE)
        assert await popped(client) == []


async def test_a_message_whose_time_was_changed_comes_again_as_another_attempt(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        await send(at, b"one")
        client = await joined(at.proxy, "me@1")
        ((_, words, times),) = await popped(client)
        changed = await client.ask(200053, delivery_fields(words, invisibleTime=10))
        assert (changed.code, changed.fields["invisibleTime"]) == (0, "10")
        assert times == 0
        ((body, again, times),) = await popped(client, pollTime=10_000)
        assert (body, times) == (b"one", 1)
        assert (await client.ask(200051, delivery_fields(words))).code == NO_MESSAGE
        assert (await client.ask(200051, delivery_fields(again))).code == 0


async def test_a_held_pop_is_answered_by_a_message_by_its_end_and_by_a_proxy_that_stops(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        client = await joined(at.proxy, "me@1")
        assert (await client.ask(200050, pop_fields(wait_ms=30))).code == NOTHING
        held = client.send(200050, pop_fields(wait_ms=15_000))
        await send(at, b"one")
        assert [entry[0] for entry in bodies((await client.answer(held)).body)] == [b"one"]
        held = client.send(200050, pop_fields(wait_ms=15_000))
        await until(lambda: len(client.connection.calls) == 1)
        at.proxy.drain()
        assert (await client.answer(held)).code == NOTHING


async def test_a_pop_takes_what_its_filter_accepts_of_the_broker_group_that_is_named(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a", "b") as at:
        for name in "ab":
            await at.create_at(name, admin_pb2.Topic(name="orders", queues=1, type="normal"))
            for tag in ("red", "blue"):
                properties = f"UNIQ_KEY\x01{name}\x02TAGS\x01{tag}\x02"
                fields = send_fields("orders", properties, n=name)
                body = f"{name} {tag}".encode()
                assert (await RemotingClient(at.proxy).ask(310, fields, body)).code == 0
        client = RemotingClient(at.proxy)
        unnamed = await client.ask(200050, pop_fields())
        assert unnamed.code == 15
        ((body, words, _),) = await popped(client, bname="b", exp="blue")
        assert (body, words.split(" ")[5]) == (b"b blue", "b")
        assert (await client.ask(200051, delivery_fields(words))).code == 0


@pytest.mark.parametrize(
    ("code", "fields", "expected"),
    [
        (200050, pop_fields(invisibleTime=0), "invisible"),
        (200050, pop_fields(expType="SQL92", exp="a LIKE"), "LIKE"),
        (200050, pop_fields(topic="a b"), "a b"),
        (200051, delivery_fields("0 1 2 0 0 a 0 0"), "has no receipt handle"),
        (200053, delivery_fields("0 1 2 0 0 a 0 0 x", invisibleTime=1), "receipt handle"),
    ],
)
async def test_a_wrong_request_is_refused_with_a_sentence(
    tmp_path: Path, code: int, fields: dict[str, object], expected: str
) -> None:
    async with orders(tmp_path) as at:
        answer = await RemotingClient(at.proxy).ask(code, fields)
        assert answer.code != 0
        assert expected in answer.remark


async def assignment(client: RemotingClient, topic: str, **more: object) -> object:
    content = {"topic": topic, "consumerGroup": "readers", "strategyName": "AVG", **more}
    answer = await client.ask(400, body=json.dumps(content).encode())
    assert answer.code == 0, answer.remark
    return json.loads(answer.body)["messageQueueAssignments"]


@pytest.mark.more
async def test_a_client_that_leaves_balancing_to_the_server_pops_and_pulls_its_retry_topic(
    tmp_path: Path,
) -> None:
    async with orders(tmp_path) as at:
        client = await joined(at.proxy, "me@1")
        place = {"topic": "orders", "brokerName": "a", "queueId": -1}
        row = {"messageQueue": place, "mode": "POP", "attachments": None}
        assert await assignment(client, "orders") == [row]
        await until_members(client, "me@1")
        retry = {"topic": "%RETRY%readers", "brokerName": "a", "queueId": 0}
        assert await assignment(client, "%RETRY%readers") == [
            {"messageQueue": retry, "mode": "PULL", "attachments": None}
        ]
        # A client without a heartbeat keeps what it has.
        assert await assignment(RemotingClient(at.proxy), "%RETRY%readers") is None
        second = RemotingClient(at.proxy, "me@2")
        await second.heartbeat(group("readers"))
        await until_members(second, "me@1", "me@2")
        assert await assignment(second, "%RETRY%readers") == []


async def test_the_mode_of_such_consumers_is_pop_and_no_other(tmp_path: Path) -> None:
    async def answered(at: House, **content: object) -> tuple[int, str]:
        asked = {"topic": "orders", "consumerGroup": "readers", "mode": "POP", **content}
        answer = await RemotingClient(at.proxy).ask(401, body=json.dumps(asked).encode())
        return answer.code, answer.remark

    async with orders(tmp_path) as at:
        assert await answered(at) == (0, "")
        code, why = await answered(at, mode="PULL")
        assert (code, "setClientRebalance(true)" in why) == (3, True)
        assert (await answered(at, topic="nothing"))[0] == 17
        assert (await answered(at, topic="%RETRY%readers"))[0] == 16


def test_shares_are_those_that_clients_compute() -> None:
    queues = list("abcdefgh")
    for strategy in ("AVG", "AVG_BY_CIRCLE"):
        for members in range(1, 12):
            shares = [share(queues, index, members, strategy) for index in range(members)]
            assert sorted(queue for share in shares for queue in share) == queues
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [list(share(queues, index, 3, "AVG")) for index in range(3)] == [
        ["a", "b", "c"],
        ["d", "e", "f"],
        ["g", "h"],
    ]
    assert list(share(queues, 1, 3, "AVG_BY_CIRCLE")) == ["b", "e", "h"]
