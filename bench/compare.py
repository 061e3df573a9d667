"""Peers side by side: same machine, same minutes, same body, one at a time, rounds interleaved.

All peers that can be set up are started and warmed; then in each round every one is measured in
each case, while all others are stopped (SIGSTOP), and the order turns from round to round.  So a
ratio compares figures that were taken within a minute, and the machine's moods meet all alike.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import measure
from bench.measure import Measure, Shape
from bench.peers.nats import Nats
from bench.peers.peer import NotAvailable, Peer
from bench.peers.popmq import Popmq
from bench.peers.rabbitmq import RabbitMq
from bench.peers.redis import Redis
from bench.peers.rocketmq import RocketMq
from popmq.cli.load.reactor import LoadError
from popmq.common.errors import PopmqError

PEERS: dict[str, Callable[[], Peer]] = {
    "popmq": Popmq,
    "popmq-up": lambda: Popmq(apart=False),
    "popmq-grpcio": lambda: Popmq(transport="grpcio"),
    "rocketmq": RocketMq,
    "rocketmq-async": lambda: RocketMq(sync=False),
    "rocketmq-jvm": lambda: RocketMq(apart=False),
    "rocketmq-jvm-async": lambda: RocketMq(apart=False, sync=False),
    "redis": Redis,
    "nats": Nats,
    "rabbitmq": RabbitMq,
}
CONSUME = Shape(4, 2)


@dataclass(frozen=True, slots=True)
class Plan:
    peers: Sequence[str]
    rounds: int = 3
    seconds: float = 5.0
    shapes: Sequence[Shape] = (Shape(64, 1), Shape(4, 64))
    body: int = 1024
    consume: bool = True
    warm_up_s: float = 300.0


@dataclass(slots=True)
class Outcome:
    plan: Plan
    settings: dict[str, str] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    warmed: dict[str, int] = field(default_factory=dict)
    measures: list[Measure] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def compare(plan: Plan, folder: Path, say: Callable[[str], None]) -> Outcome:
    """Run the plan; the peers' files are in folders of their own below `folder`."""
    outcome = Outcome(plan)
    with contextlib.ExitStack() as stack:
        peers = list(_started(plan, folder, outcome, stack, say))
        for number in range(plan.rounds):
            turn = number % max(1, len(peers))
            for peer in peers[turn:] + peers[:turn]:
                _round(peer, number, outcome, folder, say)
    return outcome


def _started(
    plan: Plan,
    folder: Path,
    outcome: Outcome,
    stack: contextlib.ExitStack,
    say: Callable[[str], None],
) -> Iterator[Peer]:
    """Each peer that starts and can be warmed, paused."""
    for key in plan.peers:
        peer = PEERS[key]()
        place = folder / key
        place.mkdir(parents=True)
        outcome.settings[peer.name] = peer.settings
        try:
            # It may have started half of what it needs when it fails.
            stack.callback(peer.stop)
            peer.start(place)
            began = time.perf_counter()
            warmed = measure.warm_up(peer, body=plan.body, seconds=plan.warm_up_s)
            if plan.consume:
                consume_s = plan.seconds
                measure.consume(
                    peer, CONSUME, seconds=consume_s, number=-1, acks="each", folder=folder
                )
        except (PopmqError, OSError, StopIteration) as error:
            kind = "cannot be set up" if isinstance(error, NotAvailable) else "failed at its start"
            outcome.unavailable[peer.name] = f"{kind}: {error}"
            say(f"{peer.name}: {kind}: {error}")
            peer.stop()
            continue
        outcome.warmed[peer.name] = warmed
        say(f"{peer.name}: warmed with {warmed} messages in {time.perf_counter() - began:.0f} s")
        _pause(peer)
        yield peer


def _round(
    peer: Peer, number: int, outcome: Outcome, folder: Path, say: Callable[[str], None]
) -> None:
    plan = outcome.plan
    for process in peer.processes():
        process.resume()
    try:
        _wait_until_awake(peer)
        for shape in plan.shapes:
            figures = measure.send(
                peer, shape, body=plan.body, seconds=plan.seconds, number=number, folder=folder
            )
            _keep(figures, outcome, say)
        for acks in ("each", "batch") if plan.consume else ():
            got = measure.consume(
                peer, CONSUME, seconds=plan.seconds, number=number, acks=acks, folder=folder
            )
            if got is not None:
                _keep(got, outcome, say)
    except PopmqError as error:
        outcome.failures.append(f"round {number}, {peer.name}: {error}")
        say(outcome.failures[-1])
    finally:
        _pause(peer)


def _keep(figures: Measure, outcome: Outcome, say: Callable[[str], None]) -> None:
    outcome.measures.append(figures)
    say(
        f"round {figures.round} {figures.peer:24} {figures.case:22} {figures.per_second:9.0f}/s "
        f"{figures.cpu_us:7.1f} us  p50 {figures.ms.p50:.2f} p99 {figures.ms.p99:.2f} ms  "
        f"loader {figures.loader_us:.1f} us  others {figures.other_cores:.2f} cores"
        + (f"  refused {figures.refused}" if figures.refused else "")
    )


def _wait_until_awake(peer: Peer) -> None:
    """Until it answers again; what lost its peers meanwhile may need to find them."""
    until = time.monotonic() + 60
    while True:
        try:
            if measure.warm_up(_Few(peer), body=128, seconds=5):
                return
            why = "no message was stored"
        except PopmqError as error:
            why = str(error)
        if time.monotonic() > until:
            raise LoadError(f"{peer.name} does not answer after its pause: {why}")
        time.sleep(0.5)


class _Few:
    """The same peer with a warm-up of a few messages."""

    def __init__(self, peer: Peer) -> None:
        self.name, self.settings, self.warm_up = peer.name, peer.settings, 100
        self.start, self.stop, self.processes = peer.start, peer.stop, peer.processes
        self.lanes, self.stored, self.consume = peer.lanes, peer.stored, peer.consume


def _pause(peer: Peer) -> None:
    for process in peer.processes():
        process.pause()
