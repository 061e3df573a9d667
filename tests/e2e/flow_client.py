"""An official Python client that sends, delays, receives and acknowledges without a pause
(`python -m e2e.flow_client`), as a SimpleConsumer unless its start says `push`.

What it tells is what the client's user was told, in the order in which that happened: `n` counts
all events of this process.  official.py is the other end, node/flow.mjs the twin.
"""

import itertools
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from e2e.python_client import Command, configuration, now_ms
from rocketmq import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
    ConsumeResult,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
)

SENDERS = 4
PAUSE_S = 0.05  # of a sender, between two messages
DELAYED = 5  # one message of so many is delayed, by 1 to 4 s
RECEIVERS = 2
ACKERS = 4
BATCH = 16
LONG_POLL_S = 2
OK = 20_000
# gRPC gives up, and does not repeat, a call that it was about to send when a proxy's GOAWAY came.
# The server has never seen it; the application acks again.
UNSENT = "GOAWAY received"

_stdout = threading.Lock()
_numbers = itertools.count()


def main() -> None:
    start = json.loads(sys.stdin.readline())
    consumer = None
    if start["group"]:
        consumer = listen(start) if start.get("kind") == "push" else Receiver(start)
    producer = Sender(start)
    emit("ready")
    for line in sys.stdin:
        match json.loads(line)["op"]:
            case "go":
                producer.go()
            case "quiet":
                producer.quiet()
                emit("done")
            case _:
                break
    del consumer
    os._exit(0)  # threads of the client that are no daemons would keep the interpreter alive


class Sender:
    def __init__(self, start: Command) -> None:
        self._topic, self._later = start["topic"], start["later"]
        self._name, self._pause_s = start.get("name", "python"), start.get("pause_s", PAUSE_S)
        self._producer = Producer(configuration(start), (self._topic, self._later))
        self._producer.startup()
        self._sending = True
        self._threads: list[threading.Thread] = []

    def go(self) -> None:
        for sender in range(SENDERS):
            thread = threading.Thread(target=self._send_for_ever, args=(sender,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def quiet(self) -> None:
        self._sending = False
        for thread in self._threads:
            thread.join()

    def _send_for_ever(self, sender: int) -> None:
        for k in itertools.count(sender, SENDERS):
            if not self._sending:
                return
            self._send(k)
            time.sleep(self._pause_s)

    def _send(self, k: int) -> None:
        message, due_ms = Message(), 0
        message.topic, message.body = self._topic, f"{self._name}-{k}".encode()
        if k % DELAYED == 0:
            due_s = int(time.time()) + 2 + k // DELAYED % 4
            due_ms = 1_000 * due_s
            message.topic, message.delivery_timestamp = self._later, due_s
        begun_ms = now_ms()
        try:
            self._producer.send(message)
        except Exception as error:
            emit("send_failed", name=message.body.decode(), error=repr(error))
        else:
            emit("sent", name=message.body.decode(), begun_ms=begun_ms, due_ms=due_ms)


class Receiver:
    def __init__(self, start: Command) -> None:
        self._invisible_s = start["invisible_s"]
        self._consumer = SimpleConsumer(
            configuration(start),
            start["group"],
            {start["topic"]: FilterExpression(), start["later"]: FilterExpression()},
            await_duration=LONG_POLL_S,
        )
        self._consumer.startup()
        self._ackers = ThreadPoolExecutor(ACKERS)
        for _ in range(RECEIVERS):
            threading.Thread(target=self._receive_for_ever, daemon=True).start()

    def _receive_for_ever(self) -> None:
        while True:
            try:
                messages = self._consumer.receive(BATCH, self._invisible_s)
            except Exception as error:
                emit("error", error=f"receive: {error!r}")
                time.sleep(0.1)
                continue
            for message in messages:
                name = message.body.decode()
                emit("seen", name=name, attempt=message.delivery_attempt)
                self._ackers.submit(self._ack, name, message)

    def _ack(self, name: str, message: Any, *, again: bool = False) -> None:
        try:
            self._consumer.ack(message)
        except Exception as error:
            if UNSENT in str(error) and not again:
                emit("ack_again", name=name)
                self._ack(name, message, again=True)
            else:
                emit("ack_failed", name=name, error=repr(error))
        else:
            emit("acked", name=name)


class Listener(MessageListener):  # type: ignore[misc]
    """Manages everything; `names` says by handle whose acknowledgement it is."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, str] = {}

    def consume(self, message: Any) -> Any:
        name = self.names[message.receipt_handle] = message.body.decode()
        emit("seen", name=name, attempt=message.delivery_attempt)
        return ConsumeResult.SUCCESS


def listen(start: Command) -> Any:
    """A push consumer tells nobody how its acknowledgements ended: they are watched."""
    listener = Listener()
    consumer = PushConsumer(
        configuration(start),
        start["group"],
        listener,
        {start["topic"]: FilterExpression(), start["later"]: FilterExpression()},
    )
    rpc = consumer.rpc_client
    acknowledge = rpc.ack_message_async

    def told(name: str, done: Any) -> None:
        error = done.exception()
        if error is None and done.result().status.code == OK:
            emit("acked", name=name)
        else:
            emit("ack_failed", name=name, error=repr(error or done.result().status.code))

    def watched(endpoints: Any, request: Any, *rest: Any, **named: Any) -> Any:
        name = listener.names[request.entries[0].receipt_handle]
        future = acknowledge(endpoints, request, *rest, **named)
        future.add_done_callback(lambda done: told(name, done))
        return future

    rpc.ack_message_async = watched
    consumer.startup()
    return consumer


def emit(event: str, **fields: Any) -> None:
    with _stdout:
        line = {"event": event, "n": next(_numbers), "at_ms": now_ms(), **fields}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
