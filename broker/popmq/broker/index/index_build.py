"""The two long jobs of the key index, as generators that do a bounded piece per turn.

`seal` makes an IndexFile of a full tail, `merge` makes one of several adjacent files; both end
with a file that is complete but not durable.  What they are made of stays untouched.
"""

from collections.abc import Generator, Sequence

from popmq.broker.index.index_file import (
    ENTRY,
    ENTRY_SIZE,
    IndexFile,
    IndexFileWriter,
    Span,
    UnpublishedIndexFile,
)
from popmq.broker.index.index_tail import BUCKET_BITS, IndexTail
from popmq.common.disk import Disk

MERGED_FILES = 16
_MERGE_BITS = 4  # a merged file has that many bits more than those it was made of
_BUCKETS_PER_TURN = 8

IndexBuild = Generator[None, None, UnpublishedIndexFile]


def file_path(folder: str, begin: int, bits: int) -> str:
    """The bits are in the name, so that a merged file and its first part can stand together."""
    return f"{folder}/{begin:020d}.{bits}"


def seal(disk: Disk, folder: str, tail: IndexTail) -> IndexBuild:
    path = file_path(folder, tail.begin, BUCKET_BITS)
    writer = IndexFileWriter(disk, path, bits=BUCKET_BITS)
    try:
        for first in range(0, 1 << BUCKET_BITS, _BUCKETS_PER_TURN):
            entries: list[bytes] = []
            for bucket in tail.buckets[first : first + _BUCKETS_PER_TURN]:
                entries += sorted(bucket)
            writer.put(_BUCKETS_PER_TURN, entries)
            yield
        return writer.finish(tail.span)
    except BaseException:
        writer.close()
        raise


def merge(disk: Disk, folder: str, files: Sequence[IndexFile], *, log_start: int) -> IndexBuild:
    """All entries of adjacent files of one size, except those that point below `log_start`."""
    bits = files[0].bits + _MERGE_BITS
    span = Span(
        files[0].span.begin,
        files[-1].span.end,
        min(file.span.min_ms for file in files),
        max(file.span.max_ms for file in files),
    )
    writer = IndexFileWriter(disk, file_path(folder, span.begin, bits), bits=bits)
    try:
        for bucket in range(1 << files[0].bits):
            entries: list[bytes] = []
            for file in files:
                part = split(file.read_buckets(bucket, 1))
                if file.span.begin < log_start:
                    part = [entry for entry in part if ENTRY.unpack(entry)[1] >= log_start]
                entries += part
            entries.sort()
            writer.put(1 << _MERGE_BITS, entries)
            yield
        return writer.finish(span)
    except BaseException:
        writer.close()
        raise


def split(data: bytes) -> list[bytes]:
    return [data[at : at + ENTRY_SIZE] for at in range(0, len(data), ENTRY_SIZE)]
