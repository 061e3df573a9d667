"""Transactions of Remoting producers over a real broker: commit, rollback and checks."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from proxy.houses import House, house
from proxy.remoting.client import RemotingClient, send_fields
from proxy.remoting.test_remoting_consumers import bodies, until

from popmq.common.clock import SystemClock
from popmq.common.errors import Code
from popmq.common.wire import admin_pb2
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.remoting.frames import Command
from popmq.testing.harness.core_broker import SMALL

COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0


@asynccontextmanager
async def payments(folder: Path) -> AsyncIterator[House]:
    async with house(folder, "a") as at:
        topic = admin_pb2.Topic(name="payments", queues=1, type="transaction")
        assert (await at.change_topic("CreateTopic", topic))[0] == Code.OK
        at.proxy.checks.start()
        yield at
        at.proxy.drain()


async def producer(proxy: Proxy, client_id: str, *groups: str) -> RemotingClient:
    client = RemotingClient(proxy, client_id)
    data = {"clientID": client_id, "producerDataSet": [{"groupName": group} for group in groups]}
    assert (await client.ask(34, body=json.dumps(data).encode())).code == 0
    return client


async def begin(client: RemotingClient, body: bytes, *, check_s: int = 600) -> Command:
    properties = (
        f"UNIQ_KEY\x01id\x02TRAN_MSG\x01true\x02PGROUP\x01payers\x02"
        f"CHECK_IMMUNITY_TIME_IN_SECONDS\x01{check_s}\x02"
    )
    answer = await client.ask(310, send_fields("payments", properties, f=4), body)
    assert answer.code == 0, answer.remark
    return answer


def end_fields(transaction_id: str, ending: int) -> dict[str, object]:
    """As 4.9.8 sends it: without a topic."""
    return {
        "producerGroup": "payers",
        "tranStateTableOffset": 0,
        "commitLogOffset": 0,
        "commitOrRollback": ending,
        "fromTransactionCheck": False,
        "msgId": "id",
        "transactionId": transaction_id,
    }


async def pulled(at: House) -> list[bytes]:
    fields: dict[str, object] = {
        "consumerGroup": "readers",
        "topic": "payments",
        "queueId": 0,
        "queueOffset": 0,
        "sysFlag": 4,
        "subscription": "*",
    }
    return [entry[0] for entry in bodies((await RemotingClient(at.proxy).ask(11, fields)).body)]


async def until_pulled(at: House, *expected: bytes) -> None:
    async with asyncio.timeout(20):
        received: list[bytes] = []
        while received != list(expected):
            await asyncio.sleep(0.02)
            received = await pulled(at)


async def test_a_half_message_is_seen_when_another_proxy_has_committed_it(tmp_path: Path) -> None:
    async with payments(tmp_path) as at:
        second = Proxy(SMALL, StaticBrokers(at.ports), SystemClock())
        client = await producer(at.proxy, "me@1", "payers")
        first, other = await begin(client, b"first"), await begin(client, b"other")
        unsure = await begin(client, b"unsure")
        assert len(first.fields["msgId"]) == 32  # a client that cannot take it apart sends no 37
        assert await pulled(at) == []
        ends = RemotingClient(second)
        for answer, ending in ((first, COMMIT), (other, ROLLBACK), (unsure, UNKNOWN)):
            fields = end_fields(answer.fields["transactionId"], ending)
            assert (await ends.ask(37, fields)).code == 0
        assert await pulled(at) == [b"first"]
        again = await ends.ask(37, end_fields(other.fields["transactionId"], COMMIT))
        assert (again.code, "was rolled back" in again.remark) == (1, True)


async def test_a_one_way_commit_has_no_answer_and_its_refusal_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with payments(tmp_path) as at:
        client = await producer(at.proxy, "me@1", "payers")
        half = (await begin(client, b"first")).fields["transactionId"]
        client.one_way(37, end_fields(half, COMMIT))
        await until_pulled(at, b"first")
        client.one_way(37, end_fields(half, ROLLBACK))
        await until(lambda: "a one-way request was refused" in caplog.text)
        assert client.answered() == 0


async def test_a_check_goes_to_a_producer_of_the_group_that_sent_the_half_message(
    tmp_path: Path,
) -> None:
    async with payments(tmp_path) as at:
        second = Proxy(SMALL, StaticBrokers(at.ports), SystemClock())
        second.checks.start()
        other = await producer(at.proxy, "me@1", "others", "CLIENT_INNER_PRODUCER")
        payer = await producer(second, "me@2", "payers")
        half = await begin(other, b"first", check_s=1)
        await until(lambda: bool(payer.pushed))
        (check,) = payer.pushed
        assert (check.code, check.is_one_way) == (39, True)
        assert check.fields["transactionId"] == half.fields["transactionId"]
        assert (check.fields["bname"], check.fields["msgId"]) == ("a", "id")
        ((body, properties, times, _),) = bodies(check.body)
        assert (body, times) == (b"first", 0)
        assert (properties["PGROUP"], properties["UNIQ_KEY"]) == ("payers", "id")
        assert properties["__transactionId__"] == half.fields["transactionId"]
        payer.one_way(37, end_fields(check.fields["transactionId"], COMMIT))
        await until_pulled(at, b"first")
        assert other.pushed == []
        second.drain()


async def test_a_producer_that_has_left_is_not_asked(tmp_path: Path) -> None:
    async with payments(tmp_path) as at:
        first, second, third = [await producer(at.proxy, f"me@{n}", "payers") for n in (1, 2, 3)]
        await first.ask(35, {"clientID": "me@1", "producerGroup": "payers"})
        second.connection.lost()
        for _ in range(3):
            await begin(third, b"x", check_s=1)
        await until(lambda: len(third.pushed) == 3)
        assert (first.pushed, second.pushed) == ([], [])


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ("TRAN_MSG\x01true\x02PGROUP\x01a b\x02", "a b"),
        ("TRAN_MSG\x01true\x02CHECK_IMMUNITY_TIME_IN_SECONDS\x013601\x02", "limit of 3600 s"),
        ("TRAN_MSG\x01true\x02CHECK_IMMUNITY_TIME_IN_SECONDS\x01-1\x02", "whole number"),
    ],
)
async def test_a_half_message_with_a_wrong_property_is_refused_with_a_sentence(
    tmp_path: Path, properties: str, expected: str
) -> None:
    async with payments(tmp_path) as at:
        answer = await RemotingClient(at.proxy).ask(310, send_fields("payments", properties), b"x")
        assert answer.code == 13, answer.remark
        assert expected in answer.remark
