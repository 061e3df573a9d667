"""One role of the official Python client, in a process of its own (`python -m e2e.python_client`).

A process of its own can be killed, and has its own interpreter lock: the latencies that are
measured are not those of the tests.  Commands come as JSON lines on stdin, events leave as JSON
lines on stdout; official.py is the other end.  The client's package is used as it comes; the
one thing looked at beside its API is the born time in the requests it sends, which it tells
nobody.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any, Protocol

from e2e.payloads import comes_back, payload
from rocketmq import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)

SENDERS = 8
RECEIVERS = 2
ACKERS = 8
BATCH = 16
LONG_POLL_S = 10

# The second argument; the roots are those of GRPC_DEFAULT_SSL_ROOTS_FILE_PATH.
OVER_TLS = sys.argv[2:] == ["tls"]
Command = dict[str, Any]
_stdout = threading.Lock()


def main() -> None:
    """Play the role named by the only argument until stdin ends or says stop."""
    roles: dict[str, Callable[[Command], Role]] = {
        "producer": ProducerRole,
        "simple": SimpleRole,
        "push": PushRole,
        "orphans": OrphansRole,
    }
    start = json.loads(sys.stdin.readline())
    running = roles[sys.argv[1]](start)
    emit("ready")
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "stop":
            break
        running.perform(command)
    emit("stopped")
    # Executor threads of the client that are no daemons would keep the interpreter alive.
    os._exit(0)


class Role(Protocol):
    def perform(self, command: Command) -> None: ...


class ProducerRole:
    def __init__(self, start: Command) -> None:
        self._topic = start["topic"]
        self._producer = Producer(configuration(start), (self._topic,), tls_enable=OVER_TLS)
        self._producer.startup()
        self._born_ms = watch_born_times(self._producer)
        self._threads = ThreadPoolExecutor(SENDERS)

    def perform(self, command: Command) -> None:
        """Send the messages of these numbers, and say so when all have an outcome; or send one
        message with a delivery time, or recall one."""
        if command["op"] == "delay":
            self._delay(command["name"], command["deliver_at_s"])
            return
        if command["op"] == "recall":
            self._recall(command["name"], command["handle"])
            return
        list(self._threads.map(lambda k: self._send(k, command), command["numbers"]))
        emit("done")

    def _send(self, k: int, command: Command) -> None:
        new_payload = payload(seed=command["seed"], k=k, max_body=command["max_body"])
        message = Message()
        message.topic, message.body, message.tag = self._topic, new_payload.body, new_payload.tag
        for key in new_payload.keys:
            message.keys = key
        for name, value in new_payload.properties.items():
            message.add_property(name, value)
        try:
            receipt = self._producer.send(message)
        except Exception as error:
            emit("send_failed", k=k, error=repr(error))
            return
        emit(
            "sent",
            k=k,
            message_id=message.message_id,
            receipt_id=receipt.message_id,
            offset=receipt.offset,
            born_ms=self._born_ms[message.message_id],
        )

    def _delay(self, name: str, deliver_at_s: int) -> None:
        message = Message()
        message.topic, message.body = self._topic, name.encode()
        message.delivery_timestamp = deliver_at_s
        try:
            receipt = self._producer.send(message)
        except Exception as error:
            emit("send_failed", name=name, error=str(error))
            return
        handle = receipt.recall_handle or ""
        emit("sent", name=name, message_id=receipt.message_id, handle=handle)

    def _recall(self, name: str, handle: str) -> None:
        try:
            message_id = self._producer.recall_message(self._topic, handle)
        except Exception as error:
            emit("recall_failed", name=name, error=str(error))
            return
        emit("recalled", name=name, message_id=message_id)


class OrphansRole:
    """Sends half messages and forgets them; asked, it commits those whose name begins so."""

    def __init__(self, start: Command) -> None:
        self._topic = start["topic"]
        topics = (self._topic,)
        self._producer = Producer(configuration(start), topics, Checker(), tls_enable=OVER_TLS)
        self._producer.startup()

    def perform(self, command: Command) -> None:
        message = Message()
        message.topic, message.body = self._topic, command["name"].encode()
        receipt = self._producer.send(message, self._producer.begin_transaction())
        emit("sent", name=command["name"], message_id=receipt.message_id)


class Checker(TransactionChecker):  # type: ignore[misc]
    def check(self, message: Any) -> Any:
        name = message.body.decode()
        emit("checked", name=name)
        expected = TransactionResolution
        return expected.COMMIT if name.startswith("commit") else expected.ROLLBACK


class SimpleRole:
    def __init__(self, start: Command) -> None:
        self._invisible_s = start["invisible_s"]
        self._consumer = SimpleConsumer(
            configuration(start),
            start["group"],
            {start["topic"]: FilterExpression()},
            await_duration=LONG_POLL_S,
            tls_enable=OVER_TLS,
        )
        self._consumer.startup()
        # Acknowledging takes other threads, so that the receivers are back in their long
        # poll when a message returns: lateness would otherwise be the client's own.
        self._ackers = ThreadPoolExecutor(ACKERS)
        for _ in range(RECEIVERS):
            threading.Thread(target=self._receive_for_ever, daemon=True).start()

    def perform(self, command: Command) -> None:
        raise ValueError(command)

    def _receive_for_ever(self) -> None:
        while True:
            try:
                messages = self._consumer.receive(BATCH, self._invisible_s)
            except Exception as error:
                emit("error", error=f"receive: {error!r}")
                time.sleep(0.2)
                continue
            received_ms = now_ms()
            for message in messages:
                acked = not refused(message)
                emit_delivery(message, received_ms=received_ms, acked=acked)
                if acked:
                    self._ackers.submit(self._ack, message)

    def _ack(self, message: Any) -> None:
        try:
            self._consumer.ack(message)
        except Exception as error:
            emit(
                "ack_failed",
                message_id=message.message_id,
                attempt=message.delivery_attempt,
                error=repr(error),
            )


class PushRole:
    def __init__(self, start: Command) -> None:
        self._consumer = PushConsumer(
            configuration(start),
            start["group"],
            Listener(),
            {start["topic"]: FilterExpression()},
            tls_enable=OVER_TLS,
        )
        self._consumer.startup()

    def perform(self, command: Command) -> None:
        raise ValueError(command)


class Listener(MessageListener):  # type: ignore[misc]
    def consume(self, message: Any) -> Any:
        received_ms = now_ms()
        acked = not refused(message)
        emit_delivery(message, received_ms=received_ms, acked=acked)
        return ConsumeResult.SUCCESS if acked else ConsumeResult.FAILURE


def configuration(start: Command) -> Any:
    return ClientConfiguration(start["endpoint"], Credentials(), start.get("namespace", ""))


def watch_born_times(producer: Any) -> dict[str, list[int]]:
    """Born times by message id, one for each request that left; fills as messages are sent."""
    born_ms: dict[str, list[int]] = {}
    rpc = producer.rpc_client
    send = rpc.send_message_async

    def watched(endpoints: Any, request: Any, *rest: Any, **named: Any) -> Any:
        for message in request.messages:
            system = message.system_properties
            stamp = system.born_timestamp
            at_ms = stamp.seconds * 1000 + stamp.nanos // 1_000_000
            born_ms.setdefault(system.message_id, []).append(at_ms)
        return send(endpoints, request, *rest, **named)

    rpc.send_message_async = watched
    return born_ms


def refused(message: Any) -> bool:
    """Whether this delivery is one that the consumer does not acknowledge."""
    k = message.properties.get("k", "")
    return message.delivery_attempt == 1 and k.isdecimal() and comes_back(int(k))


def emit_delivery(message: Any, *, received_ms: int, acked: bool) -> None:
    """`settled_ms` is taken last: for a push consumer, just before its failure is reported."""
    emit(
        "delivered",
        message_id=message.message_id,
        attempt=message.delivery_attempt,
        sha256=sha256(message.body).hexdigest(),
        size=len(message.body),
        keys=sorted(message.keys),
        tag=message.tag,
        properties=message.properties,
        born_ms=message.born_timestamp,
        corrupted=message.corrupted,
        delivered_ms=message.transport_delivery_timestamp,
        received_ms=received_ms,
        acked=acked,
        settled_ms=now_ms(),
    )


def emit(event: str, **fields: Any) -> None:
    line = json.dumps({"event": event, **fields}) + "\n"
    with _stdout:
        sys.stdout.write(line)
        sys.stdout.flush()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


if __name__ == "__main__":
    main()
