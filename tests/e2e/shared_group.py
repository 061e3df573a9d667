"""Runs a group that official clients share, and kills them: shared_client.py, node/shared.mjs.

Four slots, each with one consumer process; a killed one is replaced in its slot.  When a kill
happens is a matter of progress, so that it meets consumers at work: the number of settled
messages, read from the journals.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from e2e.official import HERE, START_S, OfficialClient, launch_node
from e2e.processes import Cluster
from e2e.shared_ledger import (
    Call,
    Consumer,
    Letter,
    Op,
    Rules,
    Seen,
    Sent,
    SharedReport,
    check_shared,
    unsettled,
)

TOPIC = GROUP = "shared"
MAX_ATTEMPTS = 5
BACK_OFF_MS = 1_000
# What a delivery of a push consumer is worth before its client is asked after.
PUSH_INVISIBLE_MS = 5_000
ODDS = {"poison": 0.005, "nack": 0.05, "leave": 0.02}
LOOK_S = 0.05
SEND_S = 120.0
# From a settled message to the next: keys of a killed push consumer may be all that is left,
# and its broker waits 30 s for a sign of life.
PROGRESS_S = 60.0
KINDS = ("python-push", "python-simple", "node-push", "node-simple")


def command(kind: str) -> list[str]:
    language, role = kind.split("-")
    if language == "python":
        return [sys.executable, "-m", "e2e.shared_client", role]
    return [launch_node("simple")[0], str(HERE / "node" / "shared.mjs"), role]


@dataclass(slots=True)
class Member:
    """One consumer process, from its start to its end."""

    client: OfficialClient
    kind: str
    journal: Path
    killed_ms: int | None = None
    read: int = 0  # bytes of the journal looked at for progress

    def settled_since(self) -> int:
        """Calls answered OK in the whole lines that came since the last look."""
        if not self.journal.exists():
            return 0
        with self.journal.open("rb") as file:
            file.seek(self.read)
            news = file.read()
        news = news[: news.rfind(b"\n") + 1]
        self.read += len(news)
        return news.count(b'"code":20000')

    def deliveries(self) -> list[Seen]:
        """The journal's content; a line that the kill cut off was of no consequence."""
        if not self.journal.exists():
            return []
        consumer = Consumer(self.client.name, "push" in self.kind, self.killed_ms)
        whole = self.journal.read_bytes().split(b"\n")[:-1]
        by_handle: dict[str, Seen] = {}
        calls: dict[int, Call] = {}
        for line in map(json.loads, whole):
            match line["kind"]:
                case "seen":
                    assert line["handle"] not in by_handle, line
                    by_handle[line["handle"]] = _seen(line, consumer)
                case "begin":
                    call = Call(Op(line["op"]), line["at"], line["wait_ms"])
                    calls[line["call"]] = call
                    by_handle[line["handle"]].calls.append(call)
                case "end":
                    calls[line["call"]].code = line["code"]
        return list(by_handle.values())


@dataclass(slots=True)
class SharedGroup:
    """A run: `keys` 0 is a normal group, else the messages are of so many message groups."""

    folder: Path
    seed: int
    count: int
    kills: int
    keys: int = 0
    invisible_s: int = 5
    kinds: tuple[str, ...] = KINDS
    victims: tuple[str, ...] = KINDS
    dice: random.Random = field(init=False)
    slots: list[Member] = field(init=False, default_factory=list)
    members: list[Member] = field(init=False, default_factory=list)
    settled: int = field(init=False, default=0)
    took_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def run(self) -> SharedReport:
        settings = {"POPMQ_POP_INVISIBLE_DEFAULT_MS": str(PUSH_INVISIBLE_MS)}
        with Cluster(self.folder, proxies=2, settings=settings) as cluster, ExitStack() as stack:
            kind = "fifo" if self.keys else "normal"
            attempts = ("--max-attempts", str(MAX_ATTEMPTS), "--back-off", f"{BACK_OFF_MS}ms")
            cluster.popmq("topic", "create", TOPIC, "--type", kind)
            cluster.popmq("group", "create", GROUP, "--type", kind, *attempts)
            for name in self.kinds:
                self.slots.append(self._join(cluster, stack, name))
            producer = stack.enter_context(
                OfficialClient(
                    "producer",
                    [sys.executable, "-m", "e2e.shared_client", "producer"],
                    folder=self.folder,
                )
            )
            producer.tell(op="start", endpoint=cluster.endpoints[0], topic=TOPIC)
            for client in [producer, *(member.client for member in self.slots)]:
                client.wait(partial(_is_ready, client), "being ready", within_s=START_S)
            started = time.monotonic()
            producer.tell(op="send", count=self.count, keys=self.keys)
            self._kill_some(cluster, stack)
            producer.wait(lambda: producer.count("done") > 0, "all sent", within_s=SEND_S)
            assert producer.of("send_failed") == []
            # What is left then, the books tell.
            self._progress(partial(self._is_empty, cluster))
            self.took_s = time.monotonic() - started
            for member in self.slots:
                member.client.wait(
                    partial(_is_ready, member.client), "being ready", within_s=START_S
                )
                assert member.client.of("error") == []
            return self._judge(cluster, producer)

    def killed(self) -> str:
        counts = {kind: 0 for kind in self.victims}
        for member in self.members:
            if member.killed_ms is not None:
                counts[member.kind] += 1
        return ", ".join(f"{kind} {count} times" for kind, count in counts.items())

    def _join(self, cluster: Cluster, stack: ExitStack, kind: str) -> Member:
        name = f"{kind}-{len(self.members)}"
        client = stack.enter_context(OfficialClient(name, command(kind), folder=self.folder))
        member = Member(client, kind, self.folder / f"{name}.jsonl")
        self.members.append(member)
        client.tell(
            op="start",
            endpoint=self.dice.choice(cluster.endpoints),
            topic=TOPIC,
            group=GROUP,
            invisible_s=self.invisible_s,
            journal=str(member.journal),
            seed=self.seed,
            odds=ODDS,
        )
        return member

    def _kill_some(self, cluster: Cluster, stack: ExitStack) -> None:
        """Each kind in turn, in an order of the dice, at progress of the dice."""
        victims = [self.victims[i % len(self.victims)] for i in range(self.kills)]
        self.dice.shuffle(victims)
        moments = range(self.count // 50, self.count * 9 // 10)
        for kind, moment in zip(
            victims, sorted(self.dice.sample(moments, self.kills)), strict=True
        ):
            went_on = self._progress(partial(self._has_settled, moment))
            assert went_on, f"{self.settled} settled, and none for {PROGRESS_S:g} s"
            slot = self.dice.choice(
                [i for i, member in enumerate(self.slots) if member.kind == kind]
            )
            self.slots[slot].killed_ms = time.time_ns() // 1_000_000
            self.slots[slot].client.stop()
            self.slots[slot] = self._join(cluster, stack, kind)

    def _has_settled(self, count: int) -> bool:
        return self.settled >= count

    def _progress(self, done: Callable[[], bool]) -> bool:
        """Wait until `done()`; false when nothing at all was settled for PROGRESS_S."""
        until = time.monotonic() + PROGRESS_S
        while not done():
            if news := sum(member.settled_since() for member in self.members):
                self.settled += news
                until = time.monotonic() + PROGRESS_S
            elif time.monotonic() > until:
                return False
            else:
                time.sleep(LOOK_S)
        return True

    def _is_empty(self, cluster: Cluster) -> bool:
        """Whether the broker owes the group nothing."""
        labels = f'{{group="{GROUP}",topic="{TOPIC}"}}'
        names = [f"popmq_consumer_{kind}_messages{labels}" for kind in ("ready", "inflight")]
        empty = all(cluster.broker.metric(name) == 0 for name in names)
        return empty and _lag(cluster)["lag"] == 0

    def _judge(self, cluster: Cluster, producer: OfficialClient) -> SharedReport:
        for member in self.slots:
            member.client.end()
        sent = [Sent(e["message_id"], e["key"], e["number"]) for e in producer.of("sent")]
        seen = [delivery for member in self.members for delivery in member.deliveries()]
        letters = [
            Letter(message["message_id"], message["attempts"], message["dead_ms"])
            for message in _objects(
                cluster.popmq("dlq", "list", GROUP, "--json", "--count", str(2 * self.count))
            )
        ]
        explained = {
            message_id: _state(cluster, message_id) for message_id in unsettled(sent, seen, letters)
        }
        kills_ms = [m.killed_ms for m in self.members if m.killed_ms is not None]
        assert len(kills_ms) == self.kills
        rules = Rules(MAX_ATTEMPTS, self.invisible_s * 1_000, BACK_OFF_MS, ordered=self.keys > 0)
        report = check_shared(
            sent=sent,
            seen=seen,
            letters=letters,
            explained=explained,
            rules=rules,
            kills_ms=kills_ms,
        )
        lag = _lag(cluster)
        report.faults += [
            f"popmq lag: {name} {lag[name]}"
            for name in ("ready", "in_flight", "delayed", "blocked", "retries", "expired")
            if lag[name]
        ]
        return report


def _lag(cluster: Cluster) -> dict[str, Any]:
    (lag, *_) = _objects(cluster.popmq("lag", "--group", GROUP, "--json"))
    return lag


def _state(cluster: Cluster, message_id: str) -> str:
    """What the broker says of a message of this group."""
    (objects,) = _objects(cluster.popmq("explain", message_id, "--group", GROUP, "--json"))
    return str(objects["state"])


def _objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def _seen(line: dict[str, Any], consumer: Consumer) -> Seen:
    return Seen(
        message_id=line["id"],
        attempt=line["attempt"],
        consumer=consumer,
        receive=line["receive"],
        place=line["place"],
        asked_ms=line["asked_ms"],
        seen_ms=line["at"],
    )


def _is_ready(client: OfficialClient) -> bool:
    return client.count("ready") > 0
