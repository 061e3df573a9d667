"""Mutated frames: nothing escapes `receive`, and nothing is held beyond the bounds."""

import random
from collections.abc import Callable

import pytest
from proxy.lean.conversation import LIMITS, check_bounds, written
from proxy.lean.peer import END, WHOLE, Peer, prefixed, zipped

from popmq.proxy.transport.lean import frames

CONVERSATIONS = 60
STEPS = 40


def request(chance: random.Random, peer: Peer) -> bytes:
    path = chance.choice(["/s/echo", "/s/held", "/s/flow", "/s/talk", "/s/none"])
    extra = [("grpc-timeout", "1S")] if chance.random() < 0.3 else []
    if chance.random() < 0.3:
        extra.append(("grpc-encoding", chance.choice(["gzip", "deflate", "identity", "br"])))
    stream, block = peer.next_id(), peer.block(path, extra)
    make = zipped if chance.random() < 0.3 else prefixed
    content = make(chance.randbytes(chance.choice([0, 5, 500, 9_000])))
    cut = chance.randint(0, len(block))
    return b"".join(
        [
            frames.frame(frames.HEADERS, 0, stream, block[:cut]),
            frames.frame(frames.CONTINUATION, WHOLE, stream, block[cut:]),
            frames.frame(frames.DATA, chance.choice([0, END]), stream, content),
        ]
        if chance.random() < 0.2
        else [
            frames.frame(frames.HEADERS, WHOLE, stream, block),
            frames.frame(frames.DATA, chance.choice([0, END]), stream, content),
        ]
    )


def some_id(chance: random.Random, peer: Peer) -> int:
    """Mostly one that is or was open."""
    if chance.random() < 0.01:
        return chance.choice([0, 2, chance.randint(0, 99), frames.MAX_STREAM_ID])
    return chance.randint(0, max(0, peer.last_id // 2)) * 2 + 1


def any_frame(chance: random.Random, peer: Peer) -> bytes:
    return frames.frame(
        chance.randint(0, 12),
        chance.randint(0, 255),
        some_id(chance, peer),
        chance.randbytes(chance.choice([0, 1, 4, 5, 6, 8, 40])),
    )


def settings(chance: random.Random, _peer: Peer) -> bytes:
    window, frame, table = (
        chance.choice([0, 1, 65_535, 1 << 20]),
        chance.choice([16_384, 20_000]),
        chance.choice([0, 100, 4_096, 1 << 20]),
    )
    return frames.settings({4: window, 5: frame, 1: table})


def window(chance: random.Random, peer: Peer) -> bytes:
    where = chance.choice([0, some_id(chance, peer)])
    return frames.window_update(where, chance.choice([1, 1_000, 1 << 20]))


def reset(chance: random.Random, peer: Peer) -> bytes:
    return frames.reset(some_id(chance, peer), chance.randint(0, 20))


Make = Callable[[random.Random, Peer], bytes]
KINDS: dict[Make, int] = {request: 40, window: 16, settings: 4, reset: 8, any_frame: 1}


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Mostly as it is; else a few bytes changed, lost, doubled or moved."""
    if not data or chance.random() < 0.95:
        return data
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed))
        match chance.randint(0, 3):
            case 0:
                changed[at] = chance.randint(0, 255)
            case 1:
                changed[at] ^= 1 << chance.randint(0, 7)
            case 2:
                del changed[at : at + chance.randint(1, 9)]
            case _:
                changed[at:at] = changed[at : at + chance.randint(1, 20)]
        if not changed:
            break
    return bytes(changed)


def answer_some(chance: random.Random, peer: Peer) -> None:
    for call in peer.held.calls:
        if chance.random() < 0.3:
            call.send(b"y" * chance.choice([0, 10, 20_000]))
        if chance.random() < 0.1:
            call.finish()
    del peer.held.calls[:-20]


@pytest.mark.parametrize("seed", range(20))
def test_no_mutated_frame_gets_an_exception_out_or_anything_beyond_its_bound(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    steps = 0
    for _ in range(CONVERSATIONS):
        peer = Peer(settings={4: chance.choice([0, 100, 65_535])}, **LIMITS)
        peer.send(request(chance, peer))
        for _ in range(STEPS):
            steps += 1
            peer.now_ms += chance.choice([0, 0, 1, 50])
            (make,) = chance.choices(list(KINDS), list(KINDS.values()))
            data = mutated(chance, make(chance, peer))
            cut = chance.randint(0, len(data))
            for part in (data[:cut], data[cut:]):
                peer.core.receive(part, peer.now_ms)
                written(peer)
            answer_some(chance, peer)
            check_bounds(peer)
            if chance.random() < 0.1:
                peer.core.tick(peer.now_ms)
            if peer.core.closing:
                break
        peer.core.lost()
        written(peer)
        assert peer.core.streams == {}
        assert peer.counters.incoming_bytes == peer.core.outbox.unsent_bytes == 0
    assert steps > CONVERSATIONS * STEPS // 5, "the conversations end too early to tell much"


@pytest.mark.parametrize("seed", range(5))
def test_no_random_bytes_get_an_exception_out(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(300):
        peer = Peer(greet=chance.random() < 0.8, **LIMITS)
        for _ in range(5):
            peer.core.receive(chance.randbytes(chance.randint(1, 60)), peer.now_ms)
        check_bounds(peer)
