"""Three replicas under load: no store is rebuilt and no send is refused.

A group with buffered check points holds messages for longer than these stay in memory, and stuck
keys of a FIFO group are parked: masters of popmq up to f6860e9 applied both with a time that
replicas did not know, and each replica rebuilt its store again and again.
"""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e.many import Many

from popmq.cli.client import Client
from popmq.common.errors import PopmqError
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api

SETTINGS = {
    "POPMQ_STORE_SNAPSHOT_BYTES": "256KiB",  # compared that often
    "POPMQ_POP_FIFO_OPEN_OFFSETS": "64",
    "POPMQ_POP_FIFO_PARK_AFTER_MS": "500",
}
RATE = 40  # sends a second of each of three senders
HOLD_S = (0, 11, 14)  # of the buffered group's consumers; check points stay 10 s in memory
STUCK = ("k1", "k2", "k3")  # message groups that nobody acks

pytestmark = pytest.mark.heavy


@pytest.mark.timeout(2_400)
@pytest.mark.parametrize("seconds", [45, pytest.param(1_800, marks=pytest.mark.long)])
def test_replicas_with_buffered_and_parked_messages_never_rebuild(
    seconds: int, tmp_path: Path
) -> None:
    with Many(tmp_path, "--replicas", "3", settings=SETTINGS) as many:
        load = Load(many.ready.endpoint, time.monotonic() + seconds)
        create(many)
        load.run()
        shown = json.loads(many.popmq("group", "show", "inorder", "--json"))
        listed = many.popmq("broker", "list")
        logs = [path.read_text() for path in (many.data / "logs").glob("broker*.log")]
    print(f"\n{load.counts} in {seconds} s, {shown['parked_keys']} keys parked\n{listed}")
    assert len(logs) == 3
    assert [log.count("rebuilding this store") for log in logs] == [0, 0, 0]
    assert [log.count("the tables are not the master's") for log in logs] == [0, 0, 0]
    assert load.refused == {}
    assert load.counts["sent"] > seconds * RATE // 4, "the machine is too slow to tell"
    assert int(shown["parked_keys"]) > 0


def create(many: Many) -> None:
    with Client(many.ready.endpoint) as client:
        for name, kind, queues in (("orders", "normal", 4), ("fifo", "fifo", 1)):
            topic = admin.Topic(name=name, type=kind, queues=queues)
            client.topic(admin.CreateTopicRequest(topic=topic))
    many.popmq("group", "create", "buffered", "--check-points", "buffered")
    many.popmq("group", "create", "inorder", "--type", "fifo")


@dataclass(slots=True)
class Load:
    endpoint: str
    until: float
    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        senders = [("orders", 1), ("orders", 2), ("fifo", 3)]
        threads = [threading.Thread(target=self._guarded, args=(self._send, *s)) for s in senders]
        consumers = [("buffered", "orders", hold_s) for hold_s in HOLD_S] + [("inorder", "fifo", 0)]
        threads += [
            threading.Thread(target=self._guarded, args=(self._consume, *c)) for c in consumers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            with Client(self.endpoint) as client:
                work(client, *arguments)
        except BaseException as failure:
            self.failures.append(failure)

    def _send(self, client: Client, topic: str, seed: int) -> None:
        rng, number = random.Random(seed), 0
        while (began := time.monotonic()) < self.until:
            number += 1
            try:
                client.send(_message(topic, f"{seed}-{number}", f"k{rng.randrange(12)}"))
                self.counts["sent"] += 1
            except PopmqError as error:
                self.refused[f"send to {topic}: {error}"] += 1
            time.sleep(max(0, 1 / RATE - (time.monotonic() - began)))

    def _consume(self, client: Client, group: str, topic: str, hold_s: float) -> None:
        queue = api.MessageQueue(topic=api.Resource(name=topic))
        held: list[tuple[float, list[api.Message]]] = []
        while time.monotonic() < self.until:
            try:
                messages = client.receive(group, queue, limit=16, wait_ms=200, invisible_ms=60_000)
            except PopmqError:
                self.counts["receives refused"] += 1
                continue
            kept = [
                message
                for message in messages
                if message.system_properties.message_group not in STUCK
            ]
            if kept:
                held.append((time.monotonic(), kept))
            while held and held[0][0] <= time.monotonic() - hold_s:
                batch = held.pop(0)[1]
                try:
                    client.ack(group, topic, batch)
                    self.counts["acked"] += len(batch)
                except PopmqError:  # an election forgets check points that were in memory only
                    self.counts["acks refused"] += len(batch)


def _message(topic: str, message_id: str, key: str) -> api.Message:
    system = api.SystemProperties(
        message_id=message_id, body_encoding=api.IDENTITY, message_type=api.NORMAL
    )
    if topic == "fifo":
        system.message_type, system.message_group = api.FIFO, key
    return api.Message(topic=api.Resource(name=topic), body=bytes(512), system_properties=system)
