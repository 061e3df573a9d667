"""A topic and a consumer group are deleted and made again under load, all accounted for.

Producers and consumers go on all the time.  One process runs them all, so that one clock orders
what they see: every time is taken before a call leaves or after its answer.
"""

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from popmq.cli.client import CallFailed, CallRefused, Client
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api

TOPIC, GROUP = "orders", "g"
PRODUCERS, CONSUMERS = 3, 2
SENDS = 150  # of a life of the topic and the group, at least
SETTLE_S = 30.0
INVISIBLE_MS = 120_000  # no delivery comes back within a life
OURS = 90_000  # codes from here on are between popmq's processes


@dataclass(slots=True)
class Life:
    """From the answers to both creations to the first deletion; times of `time.monotonic`."""

    began: float
    ended: float = float("inf")


@dataclass(slots=True)
class Ledger:
    """What clients were told. Each list is appended to by any thread."""

    sent: list[tuple[float, float, str]] = field(default_factory=list)
    acked: list[tuple[float, float, str]] = field(default_factory=list)
    received: list[tuple[float, float, str]] = field(default_factory=list)
    codes: Counter[int] = field(default_factory=Counter)
    gone: list[tuple[float, float]] = field(default_factory=list)  # no topic: deleted to creating
    lives: list[Life] = field(default_factory=list)

    def sent_in(self, life: Life) -> set[str]:
        """Acknowledged sends that began after the creations and ended before the deletions."""
        return {name for at, end, name in list(self.sent) if life.began < at and end < life.ended}

    def acked_in(self, life: Life) -> dict[str, float]:
        """When the first ack that belongs to that life was answered."""
        results: dict[str, float] = {}
        for at, end, name in list(self.acked):
            if life.began < at and end < life.ended:
                results[name] = min(end, results.get(name, end))
        return results

    def sent_without_a_topic(self) -> list[str]:
        return [
            name
            for at, end, name in self.sent
            if any(deleted < at and end < creating for deleted, creating in self.gone)
        ]

    def repeated(self) -> list[str]:
        """Deliveries that were asked for after the message was acked in that life."""
        wrong = []
        for life in self.lives:
            acked = self.acked_in(life)
            for at, end, name in self.received:
                if end < life.ended and acked.get(name, float("inf")) < at:
                    wrong.append(name)
        return wrong


class Recreation:
    """`run` so many lives at one endpoint; `lost` are the acknowledged sends that never came."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self.ledger = Ledger()
        self.lost: list[str] = []
        self._endpoint = endpoint
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._may_send = threading.Event()
        self._numbers = itertools.count()

    def run(self, lives: int) -> None:
        threads = PRODUCERS + CONSUMERS
        with Client(self._endpoint) as client, ThreadPoolExecutor(threads) as pool:
            work = [pool.submit(self._produce) for _ in range(PRODUCERS)]
            work += [pool.submit(self._consume) for _ in range(CONSUMERS)]
            try:
                self._create(client)
                self._live()
                for _ in range(lives):
                    self._delete(client)
                    self._create(client)
                    self._live()
            finally:
                self._over.set()
                self._may_send.set()
            for future in work:
                future.result()

    # -- a life

    def _live(self) -> None:
        """Until so much was sent; then all of it comes and is acked, and the load goes on."""
        life = self.ledger.lives[-1]
        self._until(lambda: len(self.ledger.sent_in(life)) >= SENDS, "sent")
        self._may_send.clear()
        expected = self.ledger.sent_in(life)
        try:
            self._until(lambda: expected <= self.ledger.acked_in(life).keys(), "")
        except TimeoutError:
            self.lost += sorted(expected - self.ledger.acked_in(life).keys())
        self._may_send.set()

    def _until(self, look: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + SETTLE_S
        while not look():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not {what} within {SETTLE_S:g} s")
            self._over.wait(0.02)

    def _delete(self, client: Client) -> None:
        steps: list[Callable[[], object]] = [
            lambda: client.topic(admin.DeleteTopicRequest(name=TOPIC)),
            lambda: client.group(admin.DeleteGroupRequest(name=GROUP)),
        ]
        self.ledger.lives[-1].ended = time.monotonic()
        self._random.shuffle(steps)
        for step in steps:
            step()
        self.ledger.gone.append((time.monotonic(), float("inf")))

    def _create(self, client: Client) -> None:
        topic, group = admin.Topic(name=TOPIC, queues=4), admin.Group(name=GROUP)
        steps: list[Callable[[], object]] = [
            lambda: client.topic(admin.CreateTopicRequest(topic=topic)),
            lambda: client.group(admin.CreateGroupRequest(group=group)),
        ]
        if self.ledger.gone:
            self.ledger.gone[-1] = self.ledger.gone[-1][0], time.monotonic()
        self._random.shuffle(steps)
        for step in steps:
            step()
        self.ledger.lives.append(Life(time.monotonic()))
        self._may_send.set()

    # -- the load

    def _produce(self) -> None:
        with Client(self._endpoint) as client:
            while not self._over.is_set():
                self._may_send.wait()
                name = f"m-{next(self._numbers)}"
                properties = api.SystemProperties(
                    message_id=name, body_encoding=api.IDENTITY, message_type=api.NORMAL
                )
                message = api.Message(
                    topic=api.Resource(name=TOPIC), body=b"x", system_properties=properties
                )
                at = time.monotonic()
                if self._told(lambda message=message: client.send(message)):  # type: ignore[misc]
                    self.ledger.sent.append((at, time.monotonic(), name))

    def _consume(self) -> None:
        queue = api.MessageQueue(topic=api.Resource(name=TOPIC))
        with Client(self._endpoint) as client:
            while not self._over.is_set():
                got: list[api.Message] = []
                at = time.monotonic()
                self._told(
                    lambda got=got: got.extend(  # type: ignore[misc]
                        client.receive(
                            GROUP, queue, limit=16, wait_ms=100, invisible_ms=INVISIBLE_MS
                        )
                    )
                )
                end = time.monotonic()
                for message in got:
                    name = message.system_properties.message_id
                    self.ledger.received.append((at, end, name))
                    before = time.monotonic()
                    if self._told(lambda message=message: client.ack(GROUP, TOPIC, [message])):  # type: ignore[misc]
                        self.ledger.acked.append((before, time.monotonic(), name))

    def _told(self, call: Callable[[], object]) -> bool:
        """Whether the answer was OK; any other is counted."""
        try:
            call()
        except CallRefused as refusal:
            self.ledger.codes[refusal.number] += 1
            self._over.wait(0.01)
            return False
        except CallFailed:
            self.ledger.codes[-1] += 1
            return False
        return True
