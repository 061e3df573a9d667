"""An official client in a process of its own: sends until told to stop, then receives everything.

    flow.py ENDPOINT TOPIC GROUP FOLDER

Each OK is a line `seconds body` in FOLDER/sent, each refusal one in FOLDER/refused; when there is a
FOLDER/stop it receives until all that was sent is there, and writes what came to FOLDER/received.
"""

import os
import sys
import time
from pathlib import Path

from rocketmq import (  # type: ignore[import-untyped]
    ClientConfiguration,
    Credentials,
    FilterExpression,
    Message,
    Producer,
    SimpleConsumer,
)

EVERY_S = 0.02
PATIENCE_S = 60.0  # without a message
INVISIBLE_S = 60


def send(config: ClientConfiguration, topic: str, folder: Path) -> set[str]:
    producer = Producer(config, (topic,))
    producer.startup()
    sent: set[str] = set()
    number = 0
    with (folder / "sent").open("w") as file, (folder / "refused").open("w") as refused:
        while not (folder / "stop").exists():
            number += 1
            body = f"{folder}-{number}"  # of this flow alone
            message = Message()
            message.topic, message.body = topic, body.encode()
            try:
                producer.send(message)
            except Exception as error:  # whatever the client makes of it: it was no OK
                why = " ".join(repr(error).split())
                print(f"{time.monotonic():.3f} {why}", file=refused, flush=True)
            else:
                sent.add(body)
                print(f"{time.monotonic():.3f} {body}", file=file, flush=True)
            time.sleep(EVERY_S)
    producer.shutdown()
    return sent


def receive(config: ClientConfiguration, topic: str, group: str, expected: set[str]) -> set[str]:
    consumer = _started(config, topic, group)
    sets: set[str] = set()
    until = time.monotonic() + PATIENCE_S
    while expected - sets and time.monotonic() < until:
        try:
            for message in (
                consumer.receive(max_message_num=32, invisible_duration=INVISIBLE_S) or []
            ):
                until = time.monotonic() + PATIENCE_S
                sets.add(message.body.decode())
                consumer.ack(message)
        except Exception as error:  # a proxy that is gone; the next call may find another
            print(repr(error), file=sys.stderr, flush=True)
            time.sleep(EVERY_S)
    consumer.shutdown()
    return sets


def _started(config: ClientConfiguration, topic: str, group: str) -> SimpleConsumer:
    while True:
        consumer = SimpleConsumer(config, group, {topic: FilterExpression()}, await_duration=5)
        try:
            consumer.startup()
        except Exception as error:
            print(repr(error), file=sys.stderr, flush=True)
            time.sleep(1)
        else:
            return consumer


def main() -> None:
    endpoint, topic, group, where = sys.argv[1:]
    folder = Path(where)
    config = ClientConfiguration(endpoint, Credentials())
    sent = send(config, topic, folder)
    results = receive(config, topic, group, sent)
    (folder / "received").write_text("\n".join(sorted(results)))
    os._exit(0)  # the client leaves threads behind


if __name__ == "__main__":
    main()
