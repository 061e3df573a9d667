"""A producer of transactions with the official Python client (`python -m e2e.transaction_client`).

It begins transactions of the numbers it is given, ends two of three of them, and forgets the third,
as a process that dies would.  What became of a number is a function of it (its "database"), which
its checker asks, too; so any producer can answer for any other.  Every step is a line in a journal,
written before the next one, so that a killed producer goes on behind its last number.
node/transactions.mjs and java/Transactions.java are the twins.
"""

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rocketmq import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
    ClientConfiguration,
    Credentials,
    Message,
    Producer,
    TransactionChecker,
    TransactionResolution,
)

TRIED, SENT, ENDED, FAILED = "tried", "sent", "ended", "failed"
_THREADS = 4
_PAUSE_S = 0.3  # after a failure: something is away


def is_committed(number: int) -> bool:
    return random.Random(number).random() < 0.6


def is_forgotten(number: int) -> bool:
    return random.Random(~number).random() < 0.34


class Checker(TransactionChecker):  # type: ignore[misc]  # it has no types
    def check(self, message: Any) -> Any:
        return _resolution(int(message.body))


def _resolution(number: int) -> Any:
    expected = TransactionResolution
    return expected.COMMIT if is_committed(number) else expected.ROLLBACK


class Journal:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self._lock = threading.Lock()

    def say(self, what: str, number: int) -> None:
        with self._lock:
            self._file.write(f"{what} {number}\n")
            self._file.flush()


def run_one(producer: Any, topic: str, journal: Journal, number: int) -> None:
    journal.say(TRIED, number)
    try:
        transaction = producer.begin_transaction()
        message = Message()
        message.topic, message.body = topic, str(number).encode()
        producer.send(message, transaction)
        journal.say(SENT, number)
        if is_forgotten(number):
            return
        if is_committed(number):
            transaction.commit()
        else:
            transaction.rollback()
        journal.say(ENDED, number)
    except Exception:
        journal.say(FAILED, number)
        time.sleep(_PAUSE_S)


def main() -> None:
    """Arguments: endpoint, topic, journal, first number, one behind the last, and the database that
    its twins in other languages read. Runs until stdin ends, to be asked about orphans."""
    endpoint, topic, path, first, end, _ = sys.argv[1:]
    journal = Journal(Path(path))
    configuration = ClientConfiguration(endpoint, Credentials())
    producer = Producer(configuration, (topic,), checker=Checker())
    while True:
        try:
            producer.startup()
            break
        except Exception:
            time.sleep(_PAUSE_S)
            producer = Producer(configuration, (topic,), checker=Checker())
    print("ready", flush=True)
    with ThreadPoolExecutor(_THREADS) as threads:
        for number in range(int(first), int(end)):
            threads.submit(run_one, producer, topic, journal, number)
    print("done", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
