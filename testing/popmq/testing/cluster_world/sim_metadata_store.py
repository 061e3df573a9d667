"""The metadata store of a simulated cluster: late, sometimes silent, and read from an old copy.

What it never does is a write whose expected version is not the newest one (R1): that is all that
controllers may rely on.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from popmq.common.protocol.group_record import GroupRecord
from popmq.controller.metadata_store import (
    MetadataStoreUnavailable,
    OnRead,
    OnSwapped,
    WriteOutcome,
    WriteResult,
)
from popmq.testing.cluster_world.host import Host
from popmq.testing.cluster_world.sometimes_states import NetSometimes
from popmq.testing.cluster_world.timeline import Timeline
from popmq.testing.harness.sometimes import StateCounts


@dataclass(slots=True)
class MetadataStoreFaults:
    takes_ms: tuple[int, int] = (1, 10)
    silent: float = 0.0  # of writes: nobody hears what came of it
    stale: float = 0.0  # of reads: an older record is answered
    late: float = 0.0  # of silent writes: written seconds later, if it still can be
    away: bool = False
    away_from: set[str] = field(default_factory=set)  # hosts that do not reach it

    def out_of_reach(self, host: Host) -> bool:
        return self.away or host.name in self.away_from


class SimMetadataStore:
    """Every record that was ever written, in order."""

    def __init__(self, timeline: Timeline, rng: random.Random, tally: StateCounts) -> None:
        self.timeline, self.rng, self.tally = timeline, rng, tally
        self.manners = MetadataStoreFaults()
        self.history: dict[str, list[GroupRecord]] = {}
        # Told of each write: key, the record before, and the new one.
        self.on_write: Callable[[str, GroupRecord | None, GroupRecord], None] = _nothing

    def newest(self, key: str) -> GroupRecord | None:
        group_records = self.history.get(key)
        return group_records[-1] if group_records else None

    def fits(self, record: GroupRecord | None, expected_version: int) -> bool:
        return (record.version if record else 0) == expected_version

    def write(self, key: str, expected_version: int, record: GroupRecord) -> WriteResult:
        found_record = self.newest(key)
        if not self.fits(found_record, expected_version):
            self.tally.hit(NetSometimes.CONFLICT)
            return WriteResult(WriteOutcome.CONFLICT, found_record)
        self.history.setdefault(key, []).append(record)
        self.on_write(key, found_record, record)
        return WriteResult(WriteOutcome.WRITTEN, record)


class HostMetadataStore:
    """One controller's way to it (`MetadataStore`)."""

    def __init__(self, shared: SimMetadataStore, host: Host) -> None:
        self._shared = shared
        self._host = host

    def read(self, key: str, then: OnRead) -> None:
        shared, life = self._shared, self._host.life
        old = shared.history.get(key, [])
        answer: GroupRecord | MetadataStoreUnavailable | None = shared.newest(key)
        if shared.manners.out_of_reach(self._host):
            answer = MetadataStoreUnavailable("the simulated store is away")
        elif len(old) > 1 and shared.rng.random() < shared.manners.stale:
            shared.tally.hit(NetSometimes.STALE_READ)
            answer = shared.rng.choice(old[-4:-1])
        self._later(life, lambda: then(answer))

    def swap(self, key: str, expected_version: int, record: GroupRecord, then: OnSwapped) -> None:
        shared, manners, life = self._shared, self._shared.manners, self._host.life
        rng = shared.rng
        if manners.out_of_reach(self._host):
            self._later(life, lambda: then(WriteResult(WriteOutcome.UNKNOWN, None, "away")))
            return
        if rng.random() >= manners.silent:
            arrives_ms = rng.randint(*manners.takes_ms)

            def arrive() -> None:
                result = shared.write(key, expected_version, record)
                self._later(life, lambda: then(result))

            shared.timeline.after(arrives_ms, arrive)
            return
        shared.tally.hit(NetSometimes.SILENT_WRITE)
        if rng.random() < manners.late:
            wait_ms = rng.choice((200, 1_500, 4_000))

            def arrive_late() -> None:
                written = shared.write(key, expected_version, record)
                late = written.outcome is WriteOutcome.WRITTEN
                shared.tally.hit(NetSometimes.LATE_WRITE, int(late))

            shared.timeline.after(wait_ms, arrive_late)
        self._later(
            life, lambda: then(WriteResult(WriteOutcome.UNKNOWN, None, "no answer in time"))
        )

    def _later(self, life: int, answer: Callable[[], None]) -> None:
        shared, host = self._shared, self._host

        def arrive() -> None:
            if host.life == life:
                host.post(answer)

        shared.timeline.after(shared.rng.randint(*shared.manners.takes_ms), arrive)


def _nothing(key: str, old: GroupRecord | None, new: GroupRecord) -> None:
    return
