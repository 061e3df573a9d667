"""Consumers of the official Python client in a FIFO group (`python -m e2e.ordered_client`).

In a process of its own, like python_client.py, whose configuration it uses.  Commands on stdin:
the start, then `send`, `consume` (SimpleConsumer) or `push` (PushConsumer); events leave as JSON
lines on stdout.
"""

import json
import os
import sys
from typing import Any

from e2e.python_client import configuration, emit
from rocketmq import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
    ConsumeResult,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
)

POLL_S = 5


def main() -> None:
    start = json.loads(sys.stdin.readline())
    topic = start["topic"]
    producer = Producer(configuration(start), (topic,))
    producer.startup()
    emit("ready")
    for line in sys.stdin:
        command = json.loads(line)
        match command["op"]:
            case "send":
                send(producer, topic, keys=command["keys"], rounds=command["rounds"])
            case "consume":
                consume(start, count=command["count"], invisible_s=command["invisible_s"])
            case "push":
                listened = PushConsumer(
                    configuration(start), start["group"], Listener(), {topic: FilterExpression()}
                )
                listened.startup()
            case "stop":
                break
    emit("stopped")
    os._exit(0)  # threads of the client that are no daemons would keep the interpreter alive


def send(producer: Any, topic: str, *, keys: int, rounds: int) -> None:
    """One message of each key a round, so that the keys of a queue are mixed."""
    for number in range(rounds):
        for key in range(keys):
            message = Message()
            message.topic, message.body = topic, b"%d" % number
            message.message_group = f"key-{key}"
            producer.send(message)
    emit("done")


class Listener(MessageListener):  # type: ignore[misc]
    """Fails each fourth message of every seventh key once; the client tries it again by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._failed: set[tuple[str, int]] = set()

    def consume(self, message: Any) -> Any:
        key, number = message.message_group, int(message.body)
        if fails(key, number, every=4) and (key, number) not in self._failed:
            self._failed.add((key, number))
            emit("failed", key=key, number=number, attempt=message.delivery_attempt)
            return ConsumeResult.FAILURE
        emit("acked", key=key, number=number, attempt=message.delivery_attempt)
        return ConsumeResult.SUCCESS


def fails(key: str, number: int, *, every: int) -> bool:
    return int(key[4:]) % 7 == 0 and number % every == 0


def consume(start: dict[str, Any], *, count: int, invisible_s: int) -> None:
    """Receive until `count` messages were acked.

    Every seventh key fails its first delivery of each third message: it is not acked, and
    neither are the later ones of its key in that reply.
    """
    consumer = SimpleConsumer(
        configuration(start),
        start["group"],
        {start["topic"]: FilterExpression()},
        await_duration=POLL_S,
    )
    consumer.startup()
    acked = 0
    while acked < count:
        failed: set[str] = set()
        for message in consumer.receive(32, invisible_s):
            key, number = message.message_group, int(message.body)
            first = message.delivery_attempt == 1
            if (first and fails(key, number, every=3)) or key in failed:
                failed.add(key)
                emit("failed", key=key, number=number, attempt=message.delivery_attempt)
                continue
            consumer.ack(message)
            acked += 1
            emit("acked", key=key, number=number, attempt=message.delivery_attempt)
    emit("consumed")


if __name__ == "__main__":
    main()
