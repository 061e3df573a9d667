"""CPU per insert and per lookup of the key index, on real files.

    python -m bench.index_cost [--messages 500000] [--lookups 2000] [--folder .]

Every message has an id and one key, so names are twice the messages.  Inserts are timed with and
without the steps and checkpoints that make files of them; lookups of names that are there and
of names that are not, before and after a restart.  Each lookup's answer is checked.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable

from popmq.broker.index.key_index import KeyIndex
from popmq.broker.index.message_keys import ID, KEY
from popmq.common.disk import RealDisk
from popmq.proxy.api import definition_pb2 as api

SIZE = 1300
TOPIC = 64
PER_TICK = 256  # messages between two steps
PER_CHECKPOINT = 100_000  # messages


def properties(number: int) -> bytes:
    """What an official client and the proxy make of a message's system properties."""
    made = api.SystemProperties(
        tag="TagA",
        keys=[f"order-{number:08d}"],
        message_id=f"01ABCDEF012345678900AABB{number:010X}",
        body_encoding=api.IDENTITY,
        message_type=api.NORMAL,
        born_host="host.example",
    )
    made.born_timestamp.FromMilliseconds(1_700_000_000_000 + number)
    made.body_digest.type = api.MD5
    made.body_digest.checksum = "0123456789ABCDEF" * 2
    return made.SerializeToString()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--lookups", type=int, default=2000)
    parser.add_argument("--folder", default=".")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        index = KeyIndex(RealDisk(), f"{folder}/index")
        index.load(0)
        insert_all(index, args.messages)
        lookup_some("lookup", index, args.messages, args.lookups)
        index.close()
        again = KeyIndex(RealDisk(), f"{folder}/index")
        began = time.perf_counter()
        again.load(0)
        print(f"load {(time.perf_counter() - began) * 1e3:.1f} ms, covers {again.covered}")
        lookup_some("lookup after a restart", again, args.messages, args.lookups)
        again.close()


def insert_all(index: KeyIndex, messages: int) -> None:
    names = messages * 2
    insert_ns = background_ns = longest_ns = 0
    clock = time.perf_counter_ns
    for first in range(0, messages, PER_TICK):
        last = min(first + PER_TICK, messages)
        batch = [properties(number) for number in range(first, last)]
        began = clock()
        for number, content in enumerate(batch, first):
            index.add(number * SIZE, SIZE, TOPIC, number, content)
        inserted = clock()
        index.step()
        stepped = clock()
        if first % PER_CHECKPOINT < PER_TICK:
            for file in index.flush(last * SIZE):
                file.sync()
        insert_ns += inserted - began
        background_ns += stepped - inserted
        longest_ns = max(longest_ns, stepped - inserted)
    began = clock()
    while index.step():
        for file in index.flush(messages * SIZE):
            file.sync()
    rest_ns = clock() - began
    for file in index.flush(messages * SIZE):
        file.sync()
    print(f"{names} names: insert {insert_ns / names / 1e3:.2f} us each")
    print(f"steps {background_ns / names / 1e3:.2f} us each, the longest {longest_ns / 1e6:.1f} ms")
    print(f"what was left to do at the end, with its syncs: {rest_ns / 1e6:.0f} ms")
    print(f"{index.metrics.sealed} files made, {index.metrics.merged} merges")


def lookup_some(title: str, index: KeyIndex, messages: int, lookups: int) -> None:
    dice = random.Random(7)
    wanted = [dice.randrange(messages) for _ in range(lookups)]

    def key(number: int) -> bool:
        found = list(index.find(TOPIC, KEY, b"order-%08d" % number))
        return (number * SIZE, SIZE) in found

    def message_id(number: int) -> bool:
        found = list(index.find(TOPIC, ID, b"01ABCDEF012345678900AABB%010X" % number))
        return (number * SIZE, SIZE) in found

    def nothing(number: int) -> bool:
        return not list(index.find(TOPIC, KEY, b"nothing-%d" % number))

    ways: tuple[tuple[str, Callable[[int], bool]], ...] = (
        ("key", key),
        ("id", message_id),
        ("absent", nothing),
    )
    for name, way in ways:
        began = time.perf_counter()
        if not all(map(way, wanted)):
            raise AssertionError(f"a lookup by {name} was wrong")
        each = (time.perf_counter() - began) / lookups * 1e6
        print(f"{title} by {name}: {each:.0f} us")


if __name__ == "__main__":
    main()
