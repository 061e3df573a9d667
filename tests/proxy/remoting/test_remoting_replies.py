"""Replies to requests of applications, handed to the client that asked, at any proxy."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from proxy.remoting.client import RemotingClient, send_fields
from proxy.remoting.test_remoting_consumers import orders, until

from popmq.common.clock import SystemClock
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.remoting.frames import Command
from popmq.proxy.remoting.stored_message import parse_properties
from popmq.testing.harness.core_broker import SMALL

TOPIC = "popmq_REPLY_TOPIC"
PROPERTIES = (
    "REPLY_TO_CLIENT\x01asker@1\x02CORRELATION_ID\x01c-1\x02MSG_TYPE\x01reply\x02TTL\x013000"
)


async def connected(proxy: Proxy, client_id: str) -> RemotingClient:
    client = RemotingClient(proxy, client_id)
    assert (await client.heartbeat()).code == 0
    return client


def reply(client: RemotingClient, body: bytes = b"yes", properties: str = PROPERTIES) -> int:
    return client.send(325, send_fields(TOPIC, properties, n="a"), body)


@pytest.mark.parametrize("same_proxy", [True, False])
async def test_a_reply_reaches_the_client_that_asked_and_is_answered_when_it_was_taken(
    tmp_path: Path, same_proxy: bool
) -> None:
    async with orders(tmp_path) as at:
        second = Proxy(SMALL, StaticBrokers(at.ports), SystemClock())
        second.remoting.start()
        asker = await connected(at.proxy if same_proxy else second, "asker@1")
        replier = await connected(at.proxy, "replier@1")
        number = reply(replier)
        await until(lambda: bool(asker.pushed))
        assert replier.answered() == 0
        (push,) = asker.pushed
        assert (push.code, push.is_one_way, push.body) == (326, False, b"yes")
        properties = parse_properties(push.fields["properties"])
        assert (properties["CORRELATION_ID"], properties["TTL"]) == ("c-1", "3000")
        assert (push.fields["topic"], push.fields["bornHost"]) == (TOPIC, "10.0.0.9:999")
        asker.respond(push)
        answer = await replier.answer(number)
        assert (answer.code, len(answer.fields["msgId"])) == (0, 32)
        assert (answer.fields["queueId"], answer.fields["queueOffset"]) == ("0", "0")
        second.drain()


@pytest.mark.parametrize("same_proxy", [True, False])
async def test_a_reply_that_its_client_refuses_or_never_takes_is_refused(
    tmp_path: Path, same_proxy: bool
) -> None:
    async with orders(tmp_path) as at:
        second = Proxy(SMALL, StaticBrokers(at.ports), SystemClock())
        second.remoting.start()
        asker = await connected(at.proxy if same_proxy else second, "asker@1")
        replier = await connected(at.proxy, "replier@1")
        refused, lost = reply(replier), reply(replier)
        await until(lambda: len(asker.pushed) == 2)
        asker.respond(asker.pushed[0], code=1)
        first = await replier.answer(refused)
        assert (first.code, "the client refused the reply: I refuse" in first.remark) == (1, True)
        asker.connection.lost()
        second_answer = await replier.answer(lost)
        assert (second_answer.code, "is not connected" in second_answer.remark) == (1, True)
        second.drain()


async def test_a_reply_to_a_client_that_no_proxy_has_is_refused_at_once(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        replier = await connected(at.proxy, "replier@1")
        async with asyncio.timeout(2):  # sooner than the client's own limit of 3 s
            answer = await replier.answer(reply(replier))
        assert (answer.code, "'asker@1' is not connected" in answer.remark) == (1, True)


async def test_the_topic_of_replies_has_a_route_and_never_exists(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        client = RemotingClient(at.proxy)
        assert (await client.ask(105, {"topic": TOPIC})).code == 0
        assert (await client.ask(105, {"topic": "other_REPLY_TOPIC"})).code == 17


@pytest.mark.parametrize(
    ("properties", "body", "expected"),
    [
        ("CORRELATION_ID\x01c-1\x02", b"x", "REPLY_TO_CLIENT and CORRELATION_ID"),
        ("REPLY_TO_CLIENT\x01a\x02", b"x", "REPLY_TO_CLIENT and CORRELATION_ID"),
        (PROPERTIES, bytes((256 << 10) + 1), "over the limit of 262144 (message.max_body_bytes)"),
    ],
)
async def test_a_wrong_reply_is_refused_with_a_sentence(
    tmp_path: Path, properties: str, body: bytes, expected: str
) -> None:
    async with orders(tmp_path) as at:
        client = RemotingClient(at.proxy)
        answer: Command = await client.answer(reply(client, body, properties))
        assert (answer.code, expected in answer.remark) == (13, True)


async def test_an_answer_that_nobody_waits_for_changes_nothing(tmp_path: Path) -> None:
    async with orders(tmp_path) as at:
        client = await connected(at.proxy, "asker@1")
        stray: dict[str, Any] = {"opaque": 77, "flag": 1}
        client.respond(Command(326, **stray))
        assert not client.connection.done
        assert (await client.heartbeat()).code == 0
