"""A load for reports to tell of, and the ledger of what clients saw of it."""

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.timestamp_pb2 import Timestamp

from popmq.cli.client import Client
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api

ORDERS, REMINDERS = 300, 40
FAR, HELD = 12, 40  # timers that do not fire; messages that a crashed consumer holds
INVISIBLE_MS = 3_000  # of the group that forgets
HELD_MS = 600_000
SETTLES_S = 60.0
# A consumer that takes some and dies by SIGKILL: it prints what it got, then waits for its end.
_CRASHES = """
import sys
from popmq.cli.client import Client
from popmq.proxy.api import definition_pb2 as api
got = 0
with Client(sys.argv[1]) as client:
    while got < int(sys.argv[2]):
        found = client.receive("crashes", api.MessageQueue(topic=api.Resource(name="orders")),
            limit=int(sys.argv[2]) - got, wait_ms=1000, invisible_ms=int(sys.argv[3]))
        got += len(found)
    print(got, flush=True)
    sys.stdin.read()
"""


@dataclass(slots=True)
class Ledger:
    """By group: ids that were acked, and deliveries as (id, attempt)."""

    orders: set[str] = field(default_factory=set)
    reminders: set[str] = field(default_factory=set)
    acked: dict[str, set[tuple[str, str]]] = field(default_factory=dict)  # group: topic, id
    delivered: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)
    held: int = 0

    def note(self, group: str, topic: str, messages: list[api.Message]) -> None:
        for message in messages:
            properties = message.system_properties
            self.delivered.setdefault(group, []).append(
                (topic, properties.message_id, properties.delivery_attempt)
            )

    def note_acked(self, group: str, topic: str, messages: list[api.Message]) -> None:
        results = self.acked.setdefault(group, set())
        results |= {(topic, message.system_properties.message_id) for message in messages}

    def count(self, group: str, topic: str) -> int:
        return sum(entry[0] == topic for entry in self.delivered.get(group, ()))

    def acks(self, group: str, topic: str) -> int:
        return sum(entry[0] == topic for entry in self.acked.get(group, ()))

    def retries(self, group: str, topic: str) -> int:
        return sum(entry[0] == topic and entry[2] > 1 for entry in self.delivered.get(group, ()))


def create(client: Client) -> None:
    for name, kind in (("orders", "normal"), ("reminders", "delay")):
        topic = admin.Topic(name=name, type=kind, queues=4)
        client.topic(admin.CreateTopicRequest(topic=topic))
    for name, attempts in (("good", 17), ("forgets", 2), ("crashes", 17)):
        group = admin.Group(name=name, type="normal", max_attempts=attempts)
        client.group(admin.CreateGroupRequest(group=group))


def work(endpoint: str, folder: Path) -> Ledger:
    """Everything that happens; at the end nothing moves any more."""
    ledger = Ledger()
    with Client(endpoint) as client:
        create(client)
        for number in range(ORDERS):
            ledger.orders.add(_send(client, "orders", number))
        for number in range(REMINDERS):
            ledger.reminders.add(_send(client, "reminders", number, due_s=1.0))
        for number in range(FAR):
            _send(client, "reminders", REMINDERS + number, due_s=3_600)
        ledger.held = _crash(endpoint, folder)
        _consume_all(client, ledger)
        _forget(client, ledger)
    return ledger


def _send(client: Client, topic: str, number: int, *, due_s: float = 0) -> str:
    message_id = f"{topic}-{number}"
    properties = api.SystemProperties(
        message_id=message_id, body_encoding=api.IDENTITY, message_type=api.NORMAL
    )
    if due_s:
        at = time.time() + due_s
        properties.delivery_timestamp.CopyFrom(Timestamp(seconds=int(at), nanos=int(at % 1 * 1e9)))
        properties.message_type = api.DELAY
    client.send(
        api.Message(topic=api.Resource(name=topic), body=b"x", system_properties=properties)
    )
    return message_id


def _crash(endpoint: str, folder: Path) -> int:
    process = subprocess.Popen(
        [sys.executable, "-c", _CRASHES, endpoint, str(HELD), str(HELD_MS)],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        return int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _consume_all(client: Client, ledger: Ledger) -> None:
    until_s = time.monotonic() + SETTLES_S
    expected = {("orders", order) for order in ledger.orders}
    expected |= {("reminders", reminder) for reminder in ledger.reminders}
    while ledger.acked.get("good", set()) != expected:
        assert time.monotonic() < until_s, "the good group did not get everything"
        for topic in ("orders", "reminders"):
            got = _receive(client, ledger, "good", topic, 60_000)
            if got:
                client.ack("good", topic, got)
                ledger.note_acked("good", topic, got)


def _forget(client: Client, ledger: Ledger) -> None:
    """Those with an even number are never acked: delivered twice, then dead."""
    until_s = time.monotonic() + SETTLES_S
    even = {order for order in ledger.orders if order[-1] in "02468"}
    while True:
        assert time.monotonic() < until_s, "the forgetful group did not settle"
        got = _receive(client, ledger, "forgets", "orders", INVISIBLE_MS)
        odd = [message for message in got if message.system_properties.message_id not in even]
        if odd:
            client.ack("forgets", "orders", odd)
            ledger.note_acked("forgets", "orders", odd)
        twice = {forget[1] for forget in ledger.delivered["forgets"] if forget[2] == 2}
        if even <= twice and _dead(client, "forgets") >= len(even):
            return


def _dead(client: Client, group: str) -> int:
    reply = client.call_admin(admin.LagRequest(group=group), admin.LagReply)
    return sum(dead_letter.stored for dead_letter in reply.dead_letters)


def _receive(
    client: Client, ledger: Ledger, group: str, topic: str, invisible_ms: int
) -> list[api.Message]:
    got = client.receive(
        group,
        api.MessageQueue(topic=api.Resource(name=topic)),
        limit=32,
        wait_ms=300,
        invisible_ms=invisible_ms,
    )
    ledger.note(group, topic, got)
    return got
