"""Requests of every served code with fields and bodies at random, and damaged frames: each request
is answered, and no handler fails.

POPMQ_TEST_FRAMES=500000 runs as many; E2E_SEED repeats a run.
"""

import asyncio
import json
import logging
import os
import random
import resource
import time
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
from proxy.houses import house
from proxy.remoting.client import RemotingClient, batch_member, send_fields

from popmq.common.wire import admin_pb2
from popmq.proxy.proxy import Proxy
from popmq.proxy.remoting.frames import Command, Serialization, encode

SEED = int(os.environ.get("E2E_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
FRAMES = int(os.environ.get("POPMQ_TEST_FRAMES", "50000"))
SLOWEST_MS = 50.0  # of the processor, of one input
GROWTH_MIB = 64 + FRAMES / 1_000  # what the broker stores meanwhile is no input's

NAMES = (
    *("topic", "consumerGroup", "group", "queueId", "queueOffset", "sysFlag", "offset", "bname"),
    *("commitOffset", "timestamp", "maxMsgNums", "maxMsgBytes", "suspendTimeoutMillis"),
    *("subscription", "expressionType", "delayLevel", "maxReconsumeTimes", "clientID"),
    *("properties", "recallHandle", *"abcdefghijlmn"),
)
VALUES = (
    *(
        "",
        "0",
        "1",
        "-1",
        "4",
        "7",
        "orders",
        "readers",
        "a",
        "b",
        "%RETRY%readers",
        "%DLQ%readers",
    ),
    *(
        "true",
        "false",
        "x",
        "9" * 30,
        "2147483647",
        str(1 << 62),
        str(1 << 31),
        "²",
        "é",
        "\x00",
        "a" * 300,
    ),
    *(
        "SQL92",
        "TAG",
        "a || b",
        "a LIKE",
        "*",
        "TAGS\x01a\x02",
        "DELAY\x0199\x02",
        "DELAY\x01-\x02",
    ),
    *("UNIQ_KEY\x01\x02", "RETRY_TOPIC\x01orders\x02", "TIMER_DELIVER_MS\x01x\x02", "\x01\x02\x01"),
)


def any_json(chance: random.Random, depth: int = 0) -> object:
    kind = chance.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [any_json(chance, depth + 1) for _ in range(chance.randrange(3))]
    if kind == 6:
        names = ("clientID", "consumerDataSet", "groupName", "subscriptionDataSet", "topic")
        more = ("mqSet", "brokerName", "queueId", "consumerGroup", "clientId", "subString")
        chosen = chance.sample([*names, *more, "messageModel", "subscriptionData", "group"], 5)
        return {name: any_json(chance, depth + 1) for name in chosen}
    return (None, True, chance.randrange(-9, 1 << 40), chance.random(), chance.choice(VALUES))[kind]


def any_body(chance: random.Random) -> bytes:
    match chance.randrange(4):
        case 0:
            return json.dumps(any_json(chance)).encode()
        case 1:
            return chance.randbytes(chance.randrange(60))
        case 2:
            data = bytearray(batch_member(b"body", "TAGS\x01a\x02") * 2)
            data[chance.randrange(len(data))] = chance.randrange(256)
            return bytes(data)
        case _:
            return b"body"


def any_fields(chance: random.Random) -> dict[str, str]:
    fields: dict[str, str] = {}
    if chance.random() < 0.7:  # most of a send or a pull is right
        fields |= {name: str(value) for name, value in send_fields("orders").items()}
        fields |= {"topic": "orders", "consumerGroup": "readers", "queueId": "0", "offset": "0"}
    for _ in range(chance.randrange(4)):
        fields[chance.choice(NAMES)] = chance.choice(VALUES)
    return fields


def damaged(chance: random.Random, frame: bytes) -> bytes:
    """A few bytes changed, cut off or put in; lengths of the frame are the likeliest place."""
    data = bytearray(frame)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(min(len(data), 9) if chance.random() < 0.5 else len(data))
        match chance.randrange(4):
            case 0:
                data[at] = chance.choice((0, 1, 4, 0x7F, 0x80, 0xFF))
            case 1:
                del data[at:]
            case 2:
                data[at:at] = chance.randbytes(chance.randrange(1, 9))
            case _:
                data[at] ^= 1 << chance.randrange(8)
        if not data:
            break
    return bytes(data)


class Fuzzer:
    """Writes frames to a proxy, and keeps what the worst of them took."""

    def __init__(self, proxy: Proxy, chance: random.Random) -> None:
        self.client = RemotingClient(proxy, "me@1")
        self.slowest_ms = 0.0
        self.codes = Counter[int]()  # of the answers
        self._proxy = proxy
        self._chance = chance
        self._codes = sorted(proxy.remoting.handlers)
        self._opaques = count(1_000)
        self._asked: list[int] = []

    def run(self) -> None:
        """One request, or the damaged frame of one, which may only end its own connection."""
        command = self._any_command()
        frame = encode(command)
        if self._chance.random() < 0.3:
            other = RemotingClient(self._proxy, "other@1")
            self._write(other, damaged(self._chance, frame))
            other.connection.lost()
        else:
            self._asked.append(command.opaque)
            self._write(self.client, frame)

    async def check_answers(self) -> None:
        for opaque in self._asked:
            answer = await self.client.answer(opaque)
            assert answer.is_response
            self.codes[answer.code] += 1
        self._asked.clear()
        assert not self.client.connection.done

    def _any_command(self) -> Command:
        fields = any_fields(self._chance)
        fields["suspendTimeoutMillis"] = "0"
        return Command(
            self._chance.choice(self._codes),
            next(self._opaques),
            fields=fields,
            body=any_body(self._chance),
            serialization=self._chance.choice(list(Serialization)),
        )

    def _write(self, client: RemotingClient, data: bytes) -> None:
        took_ms = timed_write(client, data)
        if took_ms > self.slowest_ms:  # or was it a collection of garbage?
            again = RemotingClient(self._proxy, "other@1")
            took_ms = min(took_ms, timed_write(again, data))
            again.connection.lost()
            self.slowest_ms = max(self.slowest_ms, took_ms)


def timed_write(client: RemotingClient, data: bytes) -> float:
    begin = time.thread_time()
    client.write(data)
    return (time.thread_time() - begin) * 1_000


@pytest.mark.more
async def test_requests_and_frames_at_random_are_answered_or_refused_and_no_handler_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(SEED)
    async with house(tmp_path, "a") as at:
        topic = admin_pb2.Topic(name="orders", queues=2, type="mixed")
        await at.change_topic("CreateTopic", topic)
        at.proxy.remoting.start()
        fuzzer = Fuzzer(at.proxy, chance)
        await fuzzer.client.heartbeat()
        before_kib = peak_kib()
        for number in range(FRAMES):
            fuzzer.run()
            if chance.random() < 0.05:
                await asyncio.sleep(0)
            if number % 50 == 49:
                await fuzzer.check_answers()
        await fuzzer.check_answers()
        at.proxy.drain()
    grown_mib = (peak_kib() - before_kib) / 1024
    print(f"seed {SEED}, {FRAMES} executions: slowest {fuzzer.slowest_ms:.1f} ms")
    print("answers by code:", dict(sorted(fuzzer.codes.items())))
    print(f"memory of the process grew by {grown_mib:.1f} MiB at most")
    wrong = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not wrong, wrong[0].exc_text
    assert fuzzer.slowest_ms < SLOWEST_MS
    assert grown_mib < GROWTH_MIB


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
