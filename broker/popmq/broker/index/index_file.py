"""IndexFile: one finished piece of the key index, and the writer that makes it.

Entries of 24 bytes, sorted, so that one read of one bucket answers a lookup (big-endian):

    0 hash 8 bytes | 8 position u64 | 16 size u32 | 20 kind u32

They lie behind a header and a directory of 2^bits buckets, which are the hash's first bits:

    0 magic "popmqidx" | 8 version u32 = 1 | 12 crc32c u32 over bytes [16, end of directory)
    16 begin u64 | 24 end u64        every message of these log positions is in the file
    32 min_ms u64 | 40 max_ms u64    wall times at which they were stored
    48 count u32 | 52 bits u32
    56 per bucket: first u32 (number of its first entry) | crc32c u32 over its entries

A file is written under another name, synced and renamed; from then on it never changes.
"""

import struct
from bisect import bisect_left
from typing import NamedTuple

from crc32c import crc32c

from popmq.common.disk import Disk, DiskFile

ENTRY = struct.Struct(">8sQII")
ENTRY_SIZE = ENTRY.size
NO_MS = (1 << 64) - 1

_MAGIC = b"popmqidx"
_FRONT = struct.Struct(">8sII")
_BODY = struct.Struct(">QQQQII")
_BUCKET = struct.Struct(">II")
_HEADER_SIZE = _FRONT.size + _BODY.size
_BITS_LIMIT = 16


class IndexFileDamaged(Exception):
    """The file is not what its writer finished; the log has everything to build it again."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path = path


class Span(NamedTuple):
    """What a piece of the index covers: log positions [begin, end) and their wall times."""

    begin: int
    end: int
    min_ms: int = NO_MS
    max_ms: int = 0

    def meets(self, begin_ms: int, end_ms: int) -> bool:
        """Whether a message of this span can have been stored in [begin_ms, end_ms]."""
        return self.min_ms <= end_ms and self.max_ms >= begin_ms


class IndexFile:
    """A finished file. Nothing stays open between lookups once it is durable."""

    def __init__(self, disk: Disk, path: str, file: DiskFile | None = None) -> None:
        """Read the header; raises IndexFileDamaged when it is not intact."""
        self._disk = disk
        self._file = file  # until the file has its name
        self.path = path
        front = self._read(_HEADER_SIZE, 0)
        if len(front) < _HEADER_SIZE:
            raise IndexFileDamaged(path, "it ends inside its header")
        magic, version, crc = _FRONT.unpack_from(front)
        begin, end, min_ms, max_ms, self.count, self.bits = _BODY.unpack_from(front, _FRONT.size)
        if magic != _MAGIC or version != 1 or self.bits > _BITS_LIMIT:
            raise IndexFileDamaged(path, "no index file of version 1")
        size = _BUCKET.size << self.bits
        self._directory = self._read(size, _HEADER_SIZE)
        if crc32c(self._directory, crc32c(front[_FRONT.size :])) != crc:
            raise IndexFileDamaged(path, "the header's crc32c does not match")
        self.span = Span(begin, end, min_ms, max_ms)
        self._entries_at = _HEADER_SIZE + size

    @property
    def durable(self) -> bool:
        return self._file is None

    def find(self, name_hash: bytes) -> list[tuple[int, int]]:
        """(position, size) of every entry of that hash, oldest first."""
        bucket = int.from_bytes(name_hash[:4], "big") >> (32 - self.bits)
        data = self.read_buckets(bucket, 1)
        positions = []
        at = data.find(name_hash)
        while at >= 0 and at % ENTRY_SIZE:  # the same bytes inside another entry
            at = data.find(name_hash, at + 1)
        while at >= 0 and data[at : at + 8] == name_hash:
            _, position, size, _ = ENTRY.unpack_from(data, at)
            positions.append((position, size))
            at += ENTRY_SIZE
        return positions

    def read_buckets(self, bucket: int, buckets: int) -> bytes:
        """The entries of some adjacent buckets, in order. Raises IndexFileDamaged."""
        firsts = [self._bucket(number) for number in range(bucket, bucket + buckets)]
        last = bucket + buckets
        end = self.count if last == 1 << self.bits else self._bucket(last)[0]
        first = firsts[0][0]
        data = self._read((end - first) * ENTRY_SIZE, self._entries_at + first * ENTRY_SIZE)
        ends = [start for start, _ in firsts[1:]] + [end]
        for (start, crc), stop in zip(firsts, ends, strict=True):
            part = data[(start - first) * ENTRY_SIZE : (stop - first) * ENTRY_SIZE]
            if len(part) != (stop - start) * ENTRY_SIZE or crc32c(part) != crc:
                raise IndexFileDamaged(self.path, "a bucket's crc32c does not match")
        return data

    def renamed(self) -> None:
        """The file is durable under its name: it need not stay open."""
        self.close()
        self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def destroy(self) -> None:
        self.close()
        if self._disk.exists(self.path):
            self._disk.remove(self.path)

    def _bucket(self, number: int) -> tuple[int, int]:
        first, crc = _BUCKET.unpack_from(self._directory, number * _BUCKET.size)
        return first, crc

    def _read(self, size: int, offset: int) -> bytes:
        if self._file is not None:
            return self._file.read(size, offset)
        try:
            file = self._disk.open(self.path)
        except FileNotFoundError as error:
            raise IndexFileDamaged(self.path, "it is gone") from error
        try:
            return file.read(size, offset)
        finally:
            file.close()


class IndexFileWriter:
    """Takes the buckets in order, some at a time; `finish` puts the header in front."""

    def __init__(self, disk: Disk, path: str, *, bits: int) -> None:
        self._disk = disk
        self._path = path
        self._bits = bits
        self.scratch = path + ".new"
        self._file = disk.open(self.scratch, create=True)
        self._file.truncate(0)
        self._directory = bytearray()
        self._count = 0

    def put(self, buckets: int, entries: list[bytes]) -> None:
        """The next `buckets` buckets; `entries` are theirs, sorted."""
        at = _HEADER_SIZE + (_BUCKET.size << self._bits) + self._count * ENTRY_SIZE
        first = 0
        for number in range(buckets):
            last = len(entries)
            if number + 1 < buckets:
                next_bucket = len(self._directory) // _BUCKET.size + 1
                edge = (next_bucket << (32 - self._bits)).to_bytes(4, "big")
                last = bisect_left(entries, edge, first)
            crc = crc32c(b"".join(entries[first:last]))
            self._directory += _BUCKET.pack(self._count + first, crc)
            first = last
        if entries:
            self._file.write(b"".join(entries), at)
            self._count += len(entries)

    def finish(self, span: Span) -> "UnpublishedIndexFile":
        assert len(self._directory) == _BUCKET.size << self._bits, "a bucket is missing"
        body = _BODY.pack(*span, self._count, self._bits)
        crc = crc32c(self._directory, crc32c(body))
        self._file.write(_FRONT.pack(_MAGIC, 1, crc) + body + self._directory, 0)
        index_file = IndexFile(self._disk, self._path, self._file)
        return UnpublishedIndexFile(self._disk, self._file, self.scratch, index_file)

    def close(self) -> None:
        """Give up; the scratch file is deleted when the index is opened again."""
        self._file.close()


class UnpublishedIndexFile:
    """A file that is complete and not durable yet; `sync` runs on the flusher."""

    def __init__(self, disk: Disk, file: DiskFile, scratch: str, index_file: IndexFile) -> None:
        self._disk = disk
        self._file = file
        self._scratch = scratch
        self.made = index_file
        self.done = False

    def sync(self) -> None:
        if not self.done:
            self._file.sync()
            self._disk.replace(self._scratch, self.made.path)
            self.done = True

    def discard(self) -> None:
        """Delete it instead, under whichever name it has; the flusher is idle."""
        self.made.destroy()
        if self._disk.exists(self._scratch):
            self._disk.remove(self._scratch)
