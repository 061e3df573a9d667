"""What one entry of a table counts in the state hash that replicas compare."""

from hashlib import blake2b
from typing import NamedTuple


class Row(NamedTuple):
    """One entry of a table as it counts in the state hash, in words (`popmq doctor diff`)."""

    name: str
    fields: dict[str, object]


def entry_hash(entry: bytes) -> int:
    return int.from_bytes(blake2b(entry, digest_size=16).digest(), "big")
