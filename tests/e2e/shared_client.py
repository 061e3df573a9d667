"""Official Python clients that share a group and may be killed (`python -m e2e.shared_client`).

A consumer writes each delivery, and each settling call before and after it, to a journal: one
line, one write to a file opened for appending, so that kill -9 takes nothing that was written.
The client's package is used as it comes; its outgoing calls are looked at, because a push
consumer tells nobody how they ended.  node/shared.mjs is the twin.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

from e2e.python_client import Command, configuration, emit, now_ms
from rocketmq import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
    ConsumeResult,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
)

SENDERS = 8
RECEIVERS = 2
SETTLERS = 8
BATCH = 16
LONG_POLL_S = 5
OPS = {
    "ack_message_async": "ack",
    "change_invisible_duration_async": "nack",
    "forward_message_to_dead_letter_queue_async": "reject",
}


def main() -> None:
    start = json.loads(sys.stdin.readline())
    perform = {"producer": produce, "simple": consume, "push": listen}[sys.argv[1]](start)
    emit("ready")
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "stop":
            break
        perform(command)
    os._exit(0)  # threads of the client that are no daemons would keep the interpreter alive


def produce(start: Command) -> Callable[[Command], None]:
    topic = start["topic"]
    producer = Producer(configuration(start), (topic,))
    producer.startup()

    def send(k: int, key: str, number: int) -> None:
        message = Message()
        message.topic, message.body = topic, b"%d" % k
        if key:
            message.message_group = key
        try:
            receipt = producer.send(message)
        except Exception as error:
            emit("send_failed", k=k, error=repr(error))
        else:
            emit("sent", message_id=receipt.message_id, key=key, number=number)

    def send_share(share: int, count: int, keys: int) -> None:
        """This sender's messages: all of some keys, so that one sender orders each key."""
        for k in range(count):
            if (k % keys if keys else k) % SENDERS == share:
                send(k, f"key-{k % keys}" if keys else "", k // keys if keys else k)

    def perform(command: Command) -> None:
        with ThreadPoolExecutor(SENDERS) as senders:
            for share in range(SENDERS):
                senders.submit(send_share, share, command["count"], command["keys"])
        emit("done")

    return perform


class Journal:
    """Appends lines; `watch` notes the calls of a client that settle deliveries."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        self._calls = 0

    def write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"at": now_ms(), "kind": kind, **fields}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")

    def seen(self, message: Any, **fields: Any) -> None:
        self.write(
            "seen",
            id=message.message_id,
            attempt=message.delivery_attempt,
            handle=message.receipt_handle,
            **fields,
        )

    def watch(self, consumer: Any) -> None:
        for name, op in OPS.items():
            self._watch(consumer.rpc_client, name, op)

    def _watch(self, rpc: Any, name: str, op: str) -> None:
        send = getattr(rpc, name)

        def watched(endpoints: Any, request: Any, *rest: Any, **named: Any) -> Any:
            with self._lock:
                self._calls += 1
                call = self._calls
            entries = request.entries[0] if op == "ack" else request
            wait_ms = request.invisible_duration.ToMilliseconds() if op == "nack" else 0
            self.write("begin", call=call, op=op, handle=entries.receipt_handle, wait_ms=wait_ms)
            future = send(endpoints, request, *rest, **named)
            future.add_done_callback(lambda done: self.write("end", call=call, **outcome(done)))
            return future

        setattr(rpc, name, watched)


def outcome(done: Any) -> dict[str, Any]:
    error = done.exception()
    return {"code": 0, "error": repr(error)} if error else {"code": done.result().status.code}


class Dice:
    """What becomes of a delivery: a function of the seed, the message and the attempt."""

    def __init__(self, start: Command) -> None:
        self._seed, self._odds = start["seed"], start["odds"]

    def action(self, message: Any, attempt: int) -> str:
        k = int(message.body)
        if self._draw(k, 0) < self._odds["poison"]:
            return "nack"
        drawn = self._draw(k, attempt)
        for action in ("nack", "leave"):
            if drawn < self._odds[action]:
                return action
            drawn -= self._odds[action]
        return "ack"

    def wait_s(self, message: Any) -> int:
        return int(self._draw(int(message.body), -1) * 2)

    def _draw(self, k: int, attempt: int) -> float:
        digest = sha256(f"{self._seed}/{k}/{attempt}".encode()).digest()
        return float(int.from_bytes(digest[:4], "big") / 2**32)


def consume(start: Command) -> Callable[[Command], None]:
    journal, dice = Journal(start["journal"]), Dice(start)
    consumer = SimpleConsumer(
        configuration(start),
        start["group"],
        {start["topic"]: FilterExpression()},
        await_duration=LONG_POLL_S,
    )
    consumer.startup()
    journal.watch(consumer)
    settlers = ThreadPoolExecutor(SETTLERS)

    def settle(messages: list[Any]) -> None:
        """Messages of one key, in order: behind one that fails, none may be acknowledged."""
        action = "ack"
        for message in messages:
            if action == "ack":
                action = dice.action(message, message.delivery_attempt)
            try:
                if action == "ack":
                    consumer.ack(message)
                elif action == "nack":
                    consumer.change_invisible_duration(message, dice.wait_s(message))
            except Exception:  # the journal has the outcome
                action = "leave"

    def receive_for_ever(receiver: int) -> None:
        receive = receiver
        while True:
            receive += RECEIVERS
            asked_ms = now_ms()
            try:
                messages = consumer.receive(BATCH, start["invisible_s"])
            except Exception as error:
                emit("error", error=f"receive: {error!r}")
                time.sleep(0.2)
                continue
            for place, message in enumerate(messages):
                journal.seen(message, receive=receive, place=place, asked_ms=asked_ms)
            list(settlers.map(settle, by_key(messages)))

    for receiver in range(RECEIVERS):
        threading.Thread(target=receive_for_ever, args=(receiver,), daemon=True).start()
    return refuse


def by_key(messages: Iterable[Any]) -> list[list[Any]]:
    """A list for each key, in order; messages without a key are alone."""
    lists: dict[str, list[Any]] = {}
    for message in messages:
        lists.setdefault(message.message_group or message.message_id, []).append(message)
    return list(lists.values())


class Listener(MessageListener):  # type: ignore[misc]
    """Knows again what an ordered push consumer tries again by itself, with the same handle."""

    def __init__(self, journal: Journal, dice: Dice) -> None:
        super().__init__()
        self._journal, self._dice = journal, dice
        self._first: dict[str, tuple[int, int]] = {}  # by handle: attempt, tries

    def consume(self, message: Any) -> Any:
        attempt, tries = self._first.get(message.receipt_handle, (message.delivery_attempt, 0))
        self._first[message.receipt_handle] = attempt, tries + 1
        if tries == 0:
            at_ms = now_ms()
            self._journal.seen(message, receive=None, place=0, asked_ms=at_ms)
        nack = self._dice.action(message, attempt + tries) == "nack"
        return ConsumeResult.FAILURE if nack else ConsumeResult.SUCCESS


def listen(start: Command) -> Callable[[Command], None]:
    journal = Journal(start["journal"])
    consumer = PushConsumer(
        configuration(start),
        start["group"],
        Listener(journal, Dice(start)),
        {start["topic"]: FilterExpression()},
    )
    journal.watch(consumer)
    consumer.startup()
    return refuse


def refuse(command: Command) -> None:
    raise ValueError(command)


if __name__ == "__main__":
    main()
