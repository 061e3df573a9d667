"""Frames that arrive late: after the state that they are about was replaced.

A request or an answer that is applied by another process is held back until a topic or a group was
changed (one version), a master was elected (one epoch), or a topic or a group was deleted and made
again (one incarnation).
"""

import random
from collections.abc import Callable
from enum import Enum

from popmq.common.protocol.messaging_payloads import Kind
from popmq.testing.cluster_world.timeline import Action, Timeline
from popmq.testing.groups_world.sometimes_states import GroupsSometimes as States
from popmq.testing.harness.sometimes import StateCounts

HELD_MS = 7_000  # at most; then it arrives all the same
HEARTBEAT_HELD_MS = 1_500  # a broker without heartbeats for 2 s is taken for dead
_AFTER_MS = (0, 3, 40)  # from the change on

REQUESTS = frozenset(
    {Kind.PUT, Kind.ACK, Kind.CHANGE, Kind.END_TRANSACTION, Kind.TAKE_TIMERS, Kind.RECALL}
)
ANSWERS = frozenset(
    {
        Kind.COPY_META,
        Kind.ROUTES,
        Kind.REGISTER,
        Kind.WATCH_GROUP,
        Kind.ALTER_SYNC_STATE_SET,
        Kind.DESCRIBE_TOPIC,
        Kind.DESCRIBE_GROUP,
        Kind.TAKE_TIMERS,
        Kind.CLIENTS,
        Kind.HANDSHAKE,
    }
)
METADATA = frozenset({Kind.COPY_META, Kind.DESCRIBE_TOPIC, Kind.DESCRIBE_GROUP})


class Change(Enum):
    VERSION = "version"
    EPOCH = "epoch"
    INCARNATION = "incarnation"


class LateFrames:
    """`share` of the frames of such kinds are held back."""

    def __init__(
        self,
        time: Timeline,
        rng: random.Random,
        tally: StateCounts,
        on_metadata: Callable[[], None],
        *,
        share: float,
    ) -> None:
        """`on_metadata` is called when an answer of the owner of the topics is held back."""
        self._on_metadata = on_metadata
        self._time, self._rng, self._tally = time, rng, tally
        self._share = 0.0
        self._later_share = share
        self._held: dict[Change, list[Callable[[], None]]] = {change: [] for change in Change}

    def begin(self) -> None:
        """Nothing is held back before."""
        self._share = self._later_share

    def hold(self, kind: Kind, arrive: Action, *, answer: bool) -> bool:
        """Whether the frame is held back; `arrive` is called when it comes after all."""
        if kind not in (ANSWERS if answer else REQUESTS) or self._rng.random() >= self._share:
            return False
        held = self._held[self._rng.choice(list(Change))]
        still = [arrive]

        def release() -> None:
            if still:
                still.pop()()

        held.append(release)
        if answer and kind in METADATA:
            self._on_metadata()
        limit_ms = HEARTBEAT_HELD_MS if kind is Kind.REGISTER else HELD_MS
        self._time.after(limit_ms, release)
        return True

    def happened(self, change: Change) -> None:
        """What waited for that arrives now, or soon."""
        held, self._held[change] = self._held[change], []
        self._tally.hit(States.LATE_FRAME, len(held))
        for release in held:
            self._time.after(self._rng.choice(_AFTER_MS), release)

    def stop(self) -> None:
        """All has healed: nothing is held back any more."""
        self._share = 0.0
        for change in Change:
            self.happened(change)
