"""What the doctor learns from a start that is rehearsed.

The start itself is the whole broker's, so it is handed in from above (cli/local/doctor.py): the
doctor must not have a second opinion of what a start does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from popmq.broker.doctor.finding import Repair
from popmq.broker.doctor.rehearsal_disk import RehearsalDisk
from popmq.broker.store.message_store import MessageStore


@dataclass(frozen=True, slots=True)
class RehearsalResult:
    """A start that came to its end (`store`), or why it did not (`refusal`)."""

    disk: RehearsalDisk
    store: MessageStore | None
    refusal: str = ""
    topics: dict[int, str] = field(default_factory=dict)  # id -> name
    groups: int = 0
    check_points: int = 0
    in_flight: int = 0
    unordered: dict[str, list[str]] = field(default_factory=dict)  # FIFO topics by normal group

    @property
    def kept_end(self) -> int:
        """Where the log ends after the start, before its own first record."""
        return self.store.confirmed if self.store else -1


class Rehearse(Protocol):
    def __call__(
        self, data: str, repairs: Sequence[Repair], *, segment_bytes: int, cluster: str
    ) -> RehearsalResult:
        """Start a broker on the folder with the repairs' cuts made, all of it in memory."""
        ...
