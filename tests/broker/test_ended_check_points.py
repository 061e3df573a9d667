"""Ended check points in pieces, while others end and old ones are forgotten."""

import random

from popmq.broker.deliveries.ended_check_points import OUTCOME_MS, EndedCheckPoints


def test_pieces_have_each_of_the_first_ones_that_is_still_known_and_none_added_later() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        ended = EndedCheckPoints()
        first = rng.randrange(30)
        for number in range(first):
            ended.add(number, (1, number), (1, 0, 0))
        ended.forget(OUTCOME_MS + rng.randrange(first + 1))  # some went before the begin
        end, seen, now_ms = ended.added, [], OUTCOME_MS
        for piece in ended.added_until(end, rng.randrange(1, 9)):
            seen += [key[1] for _, key, _ in piece]
            assert len(piece) <= 8
            for number in range(rng.randrange(6)):
                ended.add(100, (2, number), (number, 0, 0))  # the same one again, sometimes
            now_ms += rng.choice((0, 0, 10, 300))
            ended.forget(now_ms)
        left = [key[1] for _, key, _ in ended.order() if key[0] == 1]
        assert seen == sorted(set(seen)), "in order, each at most once"
        assert set(left) <= set(seen) <= set(range(first))


def test_a_piece_after_everything_was_forgotten_is_empty() -> None:
    ended = EndedCheckPoints()
    for number in range(4):
        ended.add(0, (1, number), (1, 0, 0))
    pieces = ended.added_until(ended.added, 2)
    assert len(next(pieces)) == 2
    for number in range(10):
        ended.add(0, (2, number), (1, 0, 0))
    ended.forget(OUTCOME_MS + 1)
    assert [entry for piece in pieces for entry in piece] == []
