"""Requests of every served code with fields and bodies at random: each is answered, and no handler
fails."""

import asyncio
import json
import logging
import os
import random
from pathlib import Path

import pytest
from proxy.houses import house
from proxy.remoting.client import RemotingClient, batch_member, send_fields

from popmq.common.wire import admin_pb2
from popmq.proxy.remoting.frames import Command, Serialization, encode

SEED = random.randrange(1 << 32)
FRAMES = int(os.environ.get("POPMQ_TEST_FRAMES", "800"))

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


@pytest.mark.more
async def test_requests_at_random_are_answered_and_no_handler_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    async with house(tmp_path, "a") as at:
        topic = admin_pb2.Topic(name="orders", queues=2, type="mixed")
        await at.change_topic("CreateTopic", topic)
        at.proxy.remoting.start()
        client = RemotingClient(at.proxy, "me@1")
        await client.heartbeat()
        codes = sorted(at.proxy.remoting.codes)
        asked = []
        for opaque in range(1_000, 1_000 + FRAMES):
            fields = any_fields(chance)
            fields["suspendTimeoutMillis"] = "0"
            command = Command(
                chance.choice(codes),
                opaque,
                fields=fields,
                body=any_body(chance),
                serialization=chance.choice(list(Serialization)),
            )
            client.write(encode(command))
            asked.append(opaque)
            if chance.random() < 0.05:
                await asyncio.sleep(0)
        for opaque in asked:
            assert (await client.answer(opaque)).is_response
        assert not client.connection.done
        at.proxy.drain()
    wrong = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not wrong, wrong[0].exc_text
