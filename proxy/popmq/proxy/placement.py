"""Which broker group and queue a message goes to (D11).

Rendezvous hashing, first over the broker groups, then over the queue numbers: the same key
meets the same queue through any proxy, so a client's resend finds its first attempt, and one
broker more or less moves only its own share of the keys.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

_MASK = 0xFFFF_FFFF_FFFF_FFFF


def place(key: str, brokers: Sequence[str], queues: int) -> tuple[str, int]:
    """The broker group and queue of `key`; `brokers` must not be empty."""
    point = _hash(key.encode())
    broker = brokers[_best(point, [_broker_hash(name) for name in brokers])]
    # The broker took part in the first choice; without it in the second, one broker's keys
    # would all meet the queues in the same order as another's.
    return broker, _best(point ^ _broker_hash(broker), _queue_hashes(queues))


def _best(point: int, nodes: Sequence[int]) -> int:
    """The index of the node with the highest score; the first, if several have it.

    The score mixes key and node (the finisher of splitmix64).  Written out, as it runs for every
    queue of every message.
    """
    if len(nodes) == 1:
        return 0
    found = best = -1
    for index, node in enumerate(nodes):
        x = point ^ node
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
        x ^= x >> 31
        if x > best:
            best, found = x, index
    return found


@lru_cache(maxsize=1024)
def _broker_hash(name: str) -> int:
    return _hash(b"broker " + name.encode())


@lru_cache(maxsize=64)
def _queue_hashes(queues: int) -> tuple[int, ...]:
    return tuple(_hash(b"queue %d" % number) for number in range(queues))


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
