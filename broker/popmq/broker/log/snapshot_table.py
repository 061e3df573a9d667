"""What a table of the broker is to snapshots, and what its entries count in the state hash that
replicas compare."""

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol, TypeVar

E = TypeVar("E")

_PER_PIECE = 512


class SnapshotTable(Protocol):
    """One part's state. `table_number` is its number in the file, 1 to 254, for ever."""

    table_number: int

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        """Fix the state of this moment; the iterator yields pieces and their part of the hash.

        Each piece is bounded work.  A piece's part of the state hash is the sum of `entry_hash`
        over what counts in it, so the order of entries does not matter.
        """
        ...

    def restore(self, content: bytes) -> None:
        """Take one piece back, in the order in which they were made."""
        ...

    def restored(self) -> None:
        """All pieces were given back; most tables are whole with the last of them."""
        return


class Row(NamedTuple):
    """One entry of a table as it counts in the state hash, in words (`popmq doctor diff`)."""

    name: str
    fields: dict[str, object]


def entry_hash(entry: bytes) -> int:
    return int.from_bytes(blake2b(entry, digest_size=16).digest(), "big")


def snapshot_pieces(
    entries: Sequence[E], encode: Callable[[E], bytes]
) -> Iterator[tuple[bytes, int]]:
    """Pieces of a table whose entries all count; they are encoded piece by piece."""
    for at in range(0, len(entries), _PER_PIECE):
        encoded = [encode(entry) for entry in entries[at : at + _PER_PIECE]]
        yield b"".join(encoded), sum(map(entry_hash, encoded))
