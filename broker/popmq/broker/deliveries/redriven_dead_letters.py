"""Dead letters go back to the group that gave them up, each once.

The redriven copy *is* the redrive: its token names the dead letter, and whoever applies it, at
append or at recovery, enters that offset here.  So a redrive that is repeated after any crash
goes on where the log says that it was (docs/concepts/dead_letters.md).
"""

import struct
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import pairwise

from popmq.broker.log.snapshot_table import Row, SnapshotTable, snapshot_pieces
from popmq.common.record.message import RedrivenLetter

_RUN = struct.Struct(">IQQ")  # dead-letter topic, first offset, end offset


class RedrivenDeadLetters(SnapshotTable):
    """Which dead letters were redriven: runs of offsets by dead-letter topic."""

    table_number = 4

    def __init__(self) -> None:
        # By topic: the borders of its runs, start and end in turn, ascending.
        self._borders: dict[int, list[int]] = {}

    def has(self, topic_id: int, offset: int) -> bool:
        return bisect_right(self._borders.get(topic_id, []), offset) % 2 == 1

    def count(self, topic_id: int, from_offset: int) -> int:
        """How many dead letters from `from_offset` on were redriven."""
        borders = self._borders.get(topic_id, [])
        pairs = zip(borders[::2], borders[1::2], strict=True)
        return sum(max(0, end - max(start, from_offset)) for start, end in pairs)

    def apply(self, letter: RedrivenLetter) -> None:
        """A redriven copy was written."""
        self._add(letter.topic_id, letter.offset)

    def drop_topic(self, topic_id: int) -> None:
        self._borders.pop(topic_id, None)

    def check_invariants(self) -> None:
        for topic_id, borders in self._borders.items():
            assert len(borders) % 2 == 0, f"topic {topic_id}: a run without an end"
            assert all(low < high for low, high in pairwise(borders)), f"topic {topic_id}: order"

    def _add(self, topic_id: int, offset: int) -> None:
        borders = self._borders.setdefault(topic_id, [])
        if bisect_right(borders, offset) % 2 == 1:
            return
        for border in (offset, offset + 1):
            # Where one run ends and the next begins there is no border.
            at = bisect_left(borders, border)
            if at < len(borders) and borders[at] == border:
                del borders[at]
            else:
                insort(borders, border)

    # -- snapshots (persistence/snapshot.py)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        runs = [
            (topic_id, start, end)
            for topic_id, borders in self._borders.items()
            for start, end in zip(borders[::2], borders[1::2], strict=True)
        ]
        return snapshot_pieces(runs, lambda run: _RUN.pack(*run))

    def restore(self, content: bytes) -> None:
        for topic_id, start, end in _RUN.iter_unpack(content):
            self._borders.setdefault(topic_id, []).extend((start, end))


def snapshot_rows(content: bytes) -> Iterator[Row]:
    for topic_id, start, end in _RUN.iter_unpack(content):
        yield Row(f"dead-letter topic {topic_id}, from offset {start}", {"end": end})
