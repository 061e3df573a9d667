"""A load that moves every panel of the dashboards: sends, delays, acks, dead letters, a refusal."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from google.protobuf.timestamp_pb2 import Timestamp

from popmq.cli.client import Client
from popmq.common.errors import PopmqError
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api


def create(client: Client) -> None:
    for name, kind in (("orders", "normal"), ("reminders", "delay")):
        topic = admin.Topic(name=name, type=kind, queues=4)
        client.topic(admin.CreateTopicRequest(topic=topic))
    for name, attempts in (("good", 17), ("forgets", 1), ("slow", 17)):
        group = admin.Group(name=name, type="normal", max_attempts=attempts)
        client.group(admin.CreateGroupRequest(group=group))


def message(topic: str, number: int, *, due_s: float = 0) -> api.Message:
    properties = api.SystemProperties(
        message_id=f"{topic}-{number}", body_encoding=api.IDENTITY, message_type=api.NORMAL
    )
    if due_s:
        properties.delivery_timestamp.CopyFrom(Timestamp(seconds=int(time.time() + due_s)))
        properties.message_type = api.DELAY
    return api.Message(
        topic=api.Resource(name=topic), body=b"x" * 500, system_properties=properties
    )


class Load:
    """Clients of every kind until it is left: a good group, a slow one, one that forgets to ack."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(item,))
            for item in (self._send, self._consume, self._forget, self._dawdle)
        ]
        self.failures: list[BaseException] = []

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, run: Callable[[Client], None]) -> None:
        try:
            with Client(self._endpoint) as client:
                run(client)
        except BaseException as failure:
            self.failures.append(failure)

    def _send(self, client: Client) -> None:
        for number in range(1_000_000):
            client.send(message("orders", number))
            if number % 10 == 0:
                client.send(message("reminders", number, due_s=1.5 if number % 20 else 3_600))
            if number % 50 == 0:
                with suppress(PopmqError):  # a refusal, to be counted
                    client.send(message("rmq_sys_meta", number))
            if self._over.wait(0.02):
                return

    def _consume(self, client: Client) -> None:
        while not self._over.is_set():
            for topic in ("orders", "reminders"):
                got = self._receive(client, "good", topic, 10_000)
                if got:
                    client.ack("good", topic, got)

    def _forget(self, client: Client) -> None:
        """Half of its messages come back when their time is over, and are dead."""
        while not self._over.is_set():
            got = self._receive(client, "forgets", "orders", 1_000)
            even = [item for item in got if item.system_properties.message_id[-1] in "02468"]
            if even:
                client.ack("forgets", "orders", even)

    def _dawdle(self, client: Client) -> None:
        """One message a second, of fifty that come."""
        while not self._over.wait(1):
            got = self._receive(client, "slow", "orders", 10_000, limit=1)
            if got:
                client.ack("slow", "orders", got)

    def _receive(
        self, client: Client, group: str, topic: str, invisible_ms: int, *, limit: int = 16
    ) -> list[api.Message]:
        return client.receive(
            group,
            api.MessageQueue(topic=api.Resource(name=topic)),
            limit=limit,
            wait_ms=300,
            invisible_ms=invisible_ms,
        )
