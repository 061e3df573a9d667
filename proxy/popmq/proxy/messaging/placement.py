"""Which broker group and queue a message goes to (D11).

Rendezvous hashing, first over the broker groups, then over the queue numbers: the same key
meets the same queue through any proxy, so a client's resend finds its first attempt, and one
broker more or less moves only its own share of the keys.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import Struct

_MASK = 0xFFFF_FFFF_FFFF_FFFF


def choose_queue(key: str, brokers: Sequence[str], queues: int) -> tuple[str, int]:
    """The broker group and queue of `key`; `brokers` must not be empty."""
    point = _hash(key.encode())
    broker = brokers[0]
    if len(brokers) > 1:
        broker = brokers[_lanes(tuple(map(_broker_hash, brokers))).best(point)]
    # The broker took part in the first choice; without it in the second, one broker's keys
    # would all meet the queues in the same order as another's.
    return broker, _queue_lanes(queues).best(point ^ _broker_hash(broker))


class Lanes:
    """Nodes side by side in one long integer, 128 bits for each, so that a few operations on it
    score all of them: a product of two numbers of 64 bits stays in its lane."""

    __slots__ = ("_low", "_nodes", "_ones", "_read", "_size")

    def __init__(self, nodes: Sequence[int]) -> None:
        self._ones = sum(1 << 128 * lane for lane in range(len(nodes)))
        self._low = self._ones * _MASK
        self._nodes = sum(node << 128 * lane for lane, node in enumerate(nodes))
        self._size = 16 * len(nodes)
        self._read = Struct("<" + "Q8x" * len(nodes)).unpack

    def best(self, point: int) -> int:
        """The index of the node with the highest score; the first, if several have it.

        The score mixes key and node (the finisher of splitmix64).
        """
        low = self._low
        x = self._ones * point ^ self._nodes
        x = (x ^ x >> 30 & low) * 0xBF58476D1CE4E5B9 & low
        x = (x ^ x >> 27 & low) * 0x94D049BB133111EB & low
        x ^= x >> 31 & low
        scores = self._read(x.to_bytes(self._size, "little"))
        return scores.index(max(scores))


@lru_cache(maxsize=1024)
def _broker_hash(name: str) -> int:
    return _hash(b"broker " + name.encode())


@lru_cache(maxsize=64)
def _lanes(nodes: tuple[int, ...]) -> Lanes:
    return Lanes(nodes)


@lru_cache(maxsize=64)
def _queue_lanes(queues: int) -> Lanes:
    return Lanes([_hash(b"queue %d" % number) for number in range(queues)])


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
