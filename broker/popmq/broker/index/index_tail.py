"""IndexTail: the newest entries of the key index, in memory, and the file that they survive in.

The file is a row of chunks in log order; the first damaged one ends it (big-endian):

    0 magic "pqix" | 4 crc32c u32 over all that follows | 8 begin u64 | 16 end u64
    24 min_ms u64 | 32 max_ms u64 of the whole tail so far | 40 count u32 | 44 reserved u32
    48 count entries of 24 bytes (index_file.py)

A chunk says that every message of [begin, end) is in it; each begins where the last one ended.
"""

import struct

from crc32c import crc32c

from popmq.broker.index.index_file import ENTRY, ENTRY_SIZE, NO_MS, Span
from popmq.common.disk import Disk, DiskFile

# The hash's first byte picks the bucket, here and in the file that the tail becomes.
BUCKET_BITS = 8
_SPILL_ENTRIES = 2048
_MAGIC = b"pqix"
_FRONT = struct.Struct(">4sI")
_BODY = struct.Struct(">QQQQII")
_HEADER_SIZE = _FRONT.size + _BODY.size


class IndexTail:
    def __init__(self, disk: Disk, folder: str, begin: int) -> None:
        self._disk = disk
        self._folder = folder
        self.path = f"{folder}/{begin:020d}.tail"
        self.begin = self.end = begin
        self.min_ms = NO_MS
        self.max_ms = 0
        self.count = 0
        self.buckets: list[list[bytes]] = [[] for _ in range(1 << BUCKET_BITS)]
        self._fresh: list[bytes] = []  # not in the file yet
        self._written_end = self._synced_end = begin
        self._file: DiskFile | None = None
        self._file_size = 0
        self._named = False

    @property
    def span(self) -> Span:
        return Span(self.begin, self.end, self.min_ms, self.max_ms)

    def add(self, entries: list[bytes], end: int, stored_ms: int) -> None:
        """The entries of one message, which ends at `end` in the log."""
        for entry in entries:
            self.buckets[entry[0]].append(entry)
        self._fresh += entries
        self.count += len(entries)
        self.end = end
        if stored_ms < self.min_ms:
            self.min_ms = stored_ms
        if stored_ms > self.max_ms:
            self.max_ms = stored_ms

    def find(self, name_hash: bytes) -> list[tuple[int, int]]:
        """(position, size) of every entry of that hash, oldest first."""
        fields = [
            ENTRY.unpack(entry)
            for entry in self.buckets[name_hash[0]]
            if entry.startswith(name_hash)
        ]
        return sorted((position, size) for _, position, size, _ in fields)

    @property
    def has_much_to_write(self) -> bool:
        return len(self._fresh) >= _SPILL_ENTRIES

    @property
    def is_dirty(self) -> bool:
        return self._synced_end != self._written_end

    def flush(self) -> None:
        """Write what is new to the file (page cache). OSError: nothing is lost, try again."""
        if self.end == self._written_end:
            return
        entries = b"".join(self._fresh)
        body = _BODY.pack(
            self._written_end, self.end, self.min_ms, self.max_ms, len(self._fresh), 0
        )
        front = _FRONT.pack(_MAGIC, crc32c(entries, crc32c(body)))
        if self._file is None:
            self._file = self._disk.open(self.path, create=True)
            self._file.truncate(0)
        self._file.write_all([front, body, entries], self._file_size)
        self._file_size += _HEADER_SIZE + len(entries)
        self._written_end = self.end
        self._fresh.clear()

    def sync(self) -> None:
        """Runs on the flusher, after `flush` on the loop."""
        assert self._file is not None, "a tail was synced that was never written"
        written_end = self._written_end
        self._file.sync()
        if not self._named:
            self._disk.sync_folder(self._folder)
            self._named = True
        self._synced_end = written_end

    def load(self) -> None:
        """Take every intact chunk of the file; what stands behind them is cut off.

        Read is not yet durable: what only the page cache kept is synced first.
        """
        self._file = self._disk.open(self.path)
        self.sync()
        data = self._file.read(self._file.size(), 0)
        at = 0
        while (size := self._load_chunk(data, at)) > 0:
            at += size
        self._file_size = at
        self._written_end = self._synced_end = self.end
        if at < len(data):
            self._file.truncate(at)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def destroy(self) -> None:
        self.close()
        if self._disk.exists(self.path):
            self._disk.remove(self.path)

    def _load_chunk(self, data: bytes, at: int) -> int:
        """Bytes of the chunk at `at` when it is intact and the next one; else 0."""
        if len(data) - at < _HEADER_SIZE:
            return 0
        magic, crc = _FRONT.unpack_from(data, at)
        begin, end, min_ms, max_ms, count, _ = _BODY.unpack_from(data, at + _FRONT.size)
        size = _HEADER_SIZE + int(count) * ENTRY_SIZE
        if magic != _MAGIC or begin != self.end or end < begin or at + size > len(data):
            return 0
        if crc32c(data[at + _FRONT.size : at + size]) != crc:
            return 0
        for entry_at in range(at + _HEADER_SIZE, at + size, ENTRY_SIZE):
            entry = data[entry_at : entry_at + ENTRY_SIZE]
            self.buckets[entry[0]].append(entry)
        self.count += count
        self.end, self.min_ms, self.max_ms = end, min_ms, max_ms
        return size
