"""KeyIndex: where in the log the messages of an id or a key are (docs/concepts/store.md).

A table of hashes beside the log: a lookup reads the messages it points to and compares, so a
collision costs a read, and a lost or damaged file costs a rebuild from the log.  New entries
go to a tail in memory and in its file; a full tail becomes an IndexFile, and sixteen files
become one, in bounded steps.  The invariant: every confirmed message of the log positions
[start, covered) is in the index.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from popmq.broker.index.index_build import MERGED_FILES, IndexBuild, merge, seal
from popmq.broker.index.index_file import (
    ENTRY,
    NO_MS,
    IndexFile,
    IndexFileDamaged,
    UnpublishedIndexFile,
)
from popmq.broker.index.index_tail import IndexTail
from popmq.broker.index.message_keys import name_hash, names_in
from popmq.broker.log.commit_log import ScannedRecord
from popmq.broker.log.segment_file import Syncable
from popmq.common.disk import Disk
from popmq.common.record.message import RecordKind, decode_message

ENTRIES_PER_FILE = 1 << 16
_pack = ENTRY.pack
_LARGEST_BITS = 16  # 16 million entries, 400 MB
# A message that retention moved is found at its new place.
_WITH_NAMES = (RecordKind.MESSAGE, RecordKind.MOVED)
_FULL_TAILS_LIMIT = 4
_UNNAMED_LIMIT = 16
_NAME = re.compile(r"(\d{20})\.(\d{1,2}|tail)")


@dataclass(slots=True)
class IndexMetrics:
    entries: int = 0  # taken since the start
    sealed: int = 0
    merged: int = 0
    damaged: int = 0
    dropped: int = 0


class KeyIndex:
    def __init__(
        self, disk: Disk, folder: str, *, entries_per_file: int = ENTRIES_PER_FILE
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._entries_per_file = entries_per_file
        self._files: list[IndexFile] = []  # oldest first
        self._full: list[IndexTail] = []
        self._tail = IndexTail(disk, folder, 0)
        self._waiting: deque[tuple[int, int, int, int, bytes]] = deque()  # arguments of `add`
        self._unnamed: list[tuple[UnpublishedIndexFile, Sequence[IndexTail | IndexFile]]] = []
        self._replaced: deque[IndexTail | IndexFile] = deque()  # by files that are durable now
        self._sealing: IndexBuild | None = None
        self._merging: tuple[IndexBuild, list[IndexFile]] | None = None
        self._merge_due = False
        self.start = 0  # the log's: what an entry below it points to is gone
        self.covered = 0
        self.has_hole = False  # a file turned out damaged: finds too little until the next start
        self.metrics = IndexMetrics()

    # -- in

    def expect(
        self, position: int, size: int, topic_id: int, stored_ms: int, properties: bytes
    ) -> None:
        """Remember a message that was just appended, until `advance` passes it."""
        self._waiting.append((position, size, topic_id, stored_ms, properties))

    def expect_all(self, messages: Sequence[tuple[int, int, int, int, bytes]]) -> None:
        """The same of many: the arguments of each, in log order."""
        self._waiting.extend(messages)

    def advance(self, confirmed: int) -> None:
        """Add every expected message that ends at or below `confirmed`."""
        waiting, add = self._waiting, self.add
        while waiting and waiting[0][0] + waiting[0][1] <= confirmed:
            add(*waiting.popleft())

    def add(
        self, position: int, size: int, topic_id: int, stored_ms: int, properties: bytes
    ) -> None:
        """Enter one confirmed message: in memory only, so this never fails for a full disk.

        Messages come in log order; one that came before is ignored.
        """
        if position < self.covered:
            return
        entries = []
        for kind, name in names_in(properties):
            entries.append(_pack(name_hash(topic_id, kind, name), position, size, kind))
        self.covered = end = position + size
        tail = self._tail
        tail.add(entries, end, stored_ms)
        self.metrics.entries += len(entries)
        if tail.count >= self._entries_per_file:
            self._full.append(tail)
            self._tail = IndexTail(self._disk, self._folder, self.covered)

    def enter(self, record: ScannedRecord) -> None:
        """The same for a record of a scan, of whatever kind."""
        header = record.header
        if header.kind in _WITH_NAMES and header.position >= self.covered:
            properties = decode_message(record.data).properties
            self.add(header.position, header.size, header.topic_id, header.wall_ms, properties)

    # -- out

    def find(
        self, topic_id: int, kind: int, name: bytes, *, begin_ms: int = 0, end_ms: int = NO_MS
    ) -> Iterator[tuple[int, int]]:
        """(position, size) of what may be the messages of a name, newest first.

        Some may be another name's, and some of another time: the caller reads and compares.
        """
        requested = name_hash(topic_id, kind, name)
        for tail in (self._tail, *reversed(self._full)):
            if tail.span.meets(begin_ms, end_ms):
                yield from (
                    match for match in reversed(tail.find(requested)) if match[0] >= self.start
                )
        for file in reversed(self._files.copy()):
            if not file.span.meets(begin_ms, end_ms) or file.span.end <= self.start:
                continue
            try:
                matches = file.find(requested)
            except IndexFileDamaged as error:
                self._condemn(error.path)
                continue
            yield from (match for match in reversed(matches) if match[0] >= self.start)

    # -- start and stop

    def load(self, log_start: int) -> None:
        """Take what the folder holds, up to the first gap; everything else in it is deleted.

        Messages from `covered` on have to be entered again.
        """
        self._disk.make_folder(self._folder)
        self.start = log_start
        chain: int | None = None
        for begin, is_tail, path in _pieces_of(self._disk, self._folder):
            piece: IndexTail | IndexFile
            try:
                tail = IndexTail(self._disk, self._folder, begin) if is_tail else None
                piece = tail or IndexFile(self._disk, path)
            except IndexFileDamaged:
                self.metrics.damaged += 1
                self._disk.remove(path)
                continue
            fits = begin <= log_start if chain is None else begin == chain
            if fits and isinstance(piece, IndexTail):
                piece.load()
            if not fits or piece.span.end <= max(begin, log_start):
                piece.destroy()
                continue
            chain = piece.span.end
            if isinstance(piece, IndexTail):
                self._full.append(piece)
            else:
                self._files.append(piece)
        self.covered = log_start if chain is None else chain
        if self._full and self._full[-1].count < self._entries_per_file:
            self._tail = self._full.pop()
        else:
            self._tail = IndexTail(self._disk, self._folder, self.covered)
        self._merge_due = True

    def truncate(self, log_end: int) -> bool:
        """Forget what lies behind the log's end; the flusher is idle. True if there was any.

        Whole pieces go, so messages from `covered` on have to be entered again.
        """
        if self.covered <= log_end:
            return False
        self._settle()
        self._cancel_jobs()
        kept = [file for file in self._files if file.span.end <= log_end and file.durable]
        # A file that is not durable has no name yet; `discard` deletes it below.
        pieces: list[IndexTail | IndexFile] = [
            *(file for file in self._files if file.span.end > log_end and file.durable),
            *self._full,
            *self._replaced,
            self._tail,
        ]
        for unnamed, replaced in self._unnamed:
            unnamed.discard()
            kept = [file for file in kept if file.span.end <= unnamed.made.span.begin]
            pieces += replaced
        pieces += [file for file in self._files if file.durable and file not in kept]
        for piece in pieces:
            piece.destroy()
        self._unnamed.clear()
        self._replaced.clear()
        self._full.clear()
        self._files = kept
        self.covered = max(kept[-1].span.end if kept else 0, self.start)
        self._tail = IndexTail(self._disk, self._folder, self.covered)
        self._disk.sync_folder(self._folder)
        return True

    def close(self) -> None:
        """Close every file; `flush` and the syncs come before, for a clean stop."""
        self._cancel_jobs()
        replaced = [piece for _, pieces in self._unnamed for piece in pieces]
        for piece in (self._tail, *self._full, *self._files, *replaced, *self._replaced):
            piece.close()

    # -- steps

    def drop_below(self, log_start: int) -> None:
        """The log starts later now; the next steps delete the files wholly below it."""
        self.start = max(self.start, log_start)

    def step(self) -> int:
        """One bounded piece of what is to do, about a millisecond; 0 when there is nothing.

        OSError when the disk is full: nothing is lost, and a later step tries again.
        """
        self._settle()
        if self._replaced:
            self._replaced.popleft().destroy()
            return 1
        if self._full:
            self._seal_some()
            return 1
        if self._tail.has_much_to_write:
            self._tail.flush()
            return 1
        if self._merging is not None or self._find_merge():
            self._merge_some()
            return 1
        oldest = self._files[0] if self._files else None
        if oldest is None or oldest.span.end > self.start or not oldest.durable:
            return 0
        self._files.pop(0).destroy()
        self.metrics.dropped += 1
        return 1

    def flush(self, covered: int) -> list[Syncable]:
        """Write everything to the files; what has to be synced on the flusher.

        `covered` is the position up to which every confirmed message was entered.  OSError as
        in `step`; a file is returned again until its sync has returned.
        """
        self._settle()
        self.covered = self._tail.end = max(self.covered, covered)
        tails = (*self._full, self._tail)
        for tail in tails:
            tail.flush()
        dirty = [tail for tail in tails if tail.is_dirty]
        return [*(unnamed for unnamed, _ in self._unnamed if not unnamed.done), *dirty]

    def spill(self) -> None:
        """Keep memory and open files bounded while a scan enters messages; it may wait."""
        while len(self._full) > _FULL_TAILS_LIMIT:
            self._seal_some()
        if len(self._unnamed) > _UNNAMED_LIMIT:
            for unnamed, _ in self._unnamed:
                unnamed.sync()
            self._settle()
        while self._replaced:
            self._replaced.popleft().destroy()

    # -- inside

    def _seal_some(self) -> None:
        tail = self._full[0]
        job = self._sealing or seal(self._disk, self._folder, tail)
        self._sealing = None  # a job that fails is begun again
        index_file = _turn(job)
        if index_file is None:
            self._sealing = job
        else:
            self._full.pop(0)
            self._files.append(index_file.made)
            # Its file is still on the flusher's list, perhaps: it goes when the new one is named.
            self._unnamed.append((index_file, [tail]))
            self.metrics.sealed += 1

    def _find_merge(self) -> bool:
        """Begin to merge the oldest sixteen neighbours of one size, if there are any."""
        if not self._merge_due:
            return False
        self._merge_due = False
        for first in range(len(self._files) - MERGED_FILES + 1):
            files = self._files[first : first + MERGED_FILES]
            if _mergeable(files):
                job = merge(self._disk, self._folder, files, log_start=self.start)
                self._merging = (job, files)
                return True
        return False

    def _merge_some(self) -> None:
        assert self._merging is not None
        job, files = self._merging
        self._merging = None
        self._merge_due = True
        try:
            index_file = _turn(job)
        except IndexFileDamaged as error:
            self._condemn(error.path)
            return
        if index_file is None:
            self._merging = (job, files)
        else:
            at = self._files.index(files[0])
            self._files[at : at + len(files)] = [index_file.made]
            self._unnamed.append((index_file, files))
            self.metrics.merged += 1

    def _settle(self) -> None:
        """Take note of the files that the flusher has made durable since."""
        while self._unnamed and self._unnamed[0][0].done:
            unnamed, replaced = self._unnamed.pop(0)
            unnamed.made.renamed()
            self._replaced += replaced
            self._merge_due = True

    def _condemn(self, path: str) -> None:
        """A file is damaged: delete it, so that the next start builds it from the log."""
        self.has_hole = True
        self.metrics.damaged += 1
        if self._merging is not None:
            self._merging[0].close()
            self._merging = None
        for file in [file for file in self._files if file.path == path and file.durable]:
            self._files.remove(file)
            file.destroy()

    def _cancel_jobs(self) -> None:
        if self._sealing is not None:
            self._sealing.close()
        if self._merging is not None:
            self._merging[0].close()
        self._sealing = self._merging = None


def _pieces_of(disk: Disk, folder: str) -> list[tuple[int, bool, str]]:
    """(begin, whether it is a tail, path) of every piece: oldest first, a large file before
    those it was made of, and a file before its tail. Scratch files are deleted."""
    tails = []
    for name in disk.names(folder):
        path = f"{folder}/{name}"
        match = _NAME.fullmatch(name)
        if match is None:
            if name.endswith(".new"):
                disk.remove(path)
            continue
        is_tail = match[2] == "tail"
        tails.append((int(match[1]), is_tail, 0 if is_tail else -int(match[2]), path))
    return [(begin, is_tail, path) for begin, is_tail, _, path in sorted(tails)]


def _turn(job: IndexBuild) -> UnpublishedIndexFile | None:
    """Run a job's next piece; its file when that was the last."""
    try:
        next(job)
    except StopIteration as stop:
        index_file: UnpublishedIndexFile = stop.value
        return index_file
    return None


def _mergeable(files: Sequence[IndexFile]) -> bool:
    neighbours = all(a.span.end == b.span.begin for a, b in pairwise(files))
    same = all(file.durable and file.bits == files[0].bits for file in files)
    return same and neighbours and files[0].bits < _LARGEST_BITS
