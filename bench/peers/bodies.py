"""The body that every peer stores: a stamp of 20 digits, then bytes that do not compress."""

import random
from functools import lru_cache

from popmq.cli.load.requests import STAMP_BYTES


@lru_cache(maxsize=8)
def _filler(body: int) -> bytes:
    return random.Random(body).randbytes(body - STAMP_BYTES)


def stamped(body: int, asked_s: float) -> bytes:
    return b"%020d%b" % (int(asked_s * 1e9), _filler(body))


def stamp_of(body: bytes) -> float:
    """Seconds of the loader's clock."""
    return int(body[:STAMP_BYTES]) / 1e9
