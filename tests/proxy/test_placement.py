"""Where messages go. A key's place must never change: a resend has to meet its first attempt."""

import random

import pytest

from popmq.proxy.messaging.placement import choose_queue

# As they have been from the first release on.
PLACES = [
    ("01AA", ("broker-a",), 8, "broker-a", 3),
    ("01AA", ("broker-a", "broker-b", "broker-c"), 8, "broker-b", 4),
    ("01AA", ("broker-b", "broker-a"), 1, "broker-b", 0),
    ("01AA", ("x", "y"), 1024, "y", 530),
    ("orders/7", ("broker-a",), 8, "broker-a", 1),
    ("orders/7", ("broker-a", "broker-b", "broker-c"), 8, "broker-b", 1),
    ("orders/7", ("broker-b", "broker-a"), 1, "broker-b", 0),
    ("orders/7", ("x", "y"), 1024, "x", 821),
    ("", ("broker-a",), 8, "broker-a", 0),
    ("", ("broker-a", "broker-b", "broker-c"), 8, "broker-a", 0),
    ("", ("broker-b", "broker-a"), 1, "broker-a", 0),
    ("", ("x", "y"), 1024, "x", 878),
    ("\u043a\u043b\u044e\u0447", ("broker-a",), 8, "broker-a", 4),
    ("\u043a\u043b\u044e\u0447", ("broker-a", "broker-b", "broker-c"), 8, "broker-b", 0),
    ("\u043a\u043b\u044e\u0447", ("broker-b", "broker-a"), 1, "broker-b", 0),
    ("\u043a\u043b\u044e\u0447", ("x", "y"), 1024, "y", 858),
]


@pytest.mark.parametrize(("key", "brokers", "queues", "broker", "queue"), PLACES)
def test_a_key_is_where_it_has_always_been(
    key: str, brokers: tuple[str, ...], queues: int, broker: str, queue: int
) -> None:
    assert choose_queue(key, brokers, queues) == (broker, queue)


def test_a_broker_more_moves_only_what_it_takes_over() -> None:
    chance = random.Random(3)
    keys = [f"{chance.getrandbits(128):032X}" for _ in range(3_000)]
    two = {key: choose_queue(key, ("a", "b"), 8) for key in keys}
    three = {key: choose_queue(key, ("c", "b", "a"), 8) for key in keys}
    moved = [key for key in keys if two[key] != three[key]]
    assert all(three[key][0] == "c" for key in moved)
    assert 800 < len(moved) < 1_200


def test_keys_spread_evenly_over_the_queues_of_each_broker() -> None:
    chance = random.Random(5)
    counts: dict[tuple[str, int], int] = {}
    for _ in range(16_000):
        there = choose_queue(f"{chance.getrandbits(128):032X}", ("a", "b"), 8)
        counts[there] = counts.get(there, 0) + 1
    assert len(counts) == 16
    assert all(850 < count < 1_150 for count in counts.values())
