"""A master that is cut off together with a proxy: what it goes on telling that proxy's clients.

Nobody else hears of what it does, so none of it may be a word that binds (rules 7 and 8 of
durability): a buffered group is given nothing there that its successor has done with, and of two
clients that want one topic differently neither learns from a refusal that the topic exists.
"""

from functools import partial

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.cluster_world.broker import ClusterBroker
from popmq.testing.cluster_world.clients import NORMAL
from popmq.testing.cluster_world.history import ClusterReader
from popmq.testing.cluster_world.sometimes_states import ClusterSometimes as States
from popmq.testing.cluster_world.world import ClusterWorld

_WAITING = 4  # messages that are there for the buffered group
_CONFIRMED_MS = 300  # within which they mostly are
_LOOK_MS = 100
_ROUNDS = 8  # of receives from the successor
_INVISIBLE_MS = 9_000  # long enough to be buffered
_PATIENCE_MS = 800  # of who makes a topic: over long before the network heals


class IsolatedMaster:
    """At most one at a time; `spared` is the reader that nobody else uses meanwhile."""

    LASTS_MS = 9_000

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        self._rng = world.rng
        self._buffered = next(reader for reader in world.oracle.readers if reader.buffered)
        self._topics = 0
        self._exist: set[str] = set()  # topics of which a refusal said so
        self.spared: ClusterReader | None = None

    def begin(self) -> None:
        world, rng = self._world, self._rng
        up = [number for number, router in enumerate(world.routers) if router is not None]
        if self.spared is not None or len(up) < 2 or not world.masters:
            return
        self.spared = self._buffered
        for _ in range(_WAITING):
            world.clients.send(NORMAL)
        master, near = rng.choice(world.masters), rng.choice(up)
        world.time.after(_CONFIRMED_MS, partial(self._cut, master, near))

    def _cut(self, master: ClusterBroker, near: int) -> None:
        world = self._world
        if world.healed or master not in world.masters:
            self.spared = None
            return
        mine = (master.name, world.proxies[near].name)
        others = [broker.name for broker in world.brokers] + [proxy.name for proxy in world.proxies]
        others += [controller.host.name for controller in world.controllers]
        world.trace_line(f"{mine[0]} and {mine[1]} are cut off from all others")
        for name in sorted(set(others) - set(mine)):
            for own in mine:
                world.net.cut(own, name)
                world.net.cut(name, own)
        world.time.after(self.LASTS_MS - _CONFIRMED_MS, self._end)
        self._make_twice(near)
        self._wait_for_successor(master, near)

    def _end(self) -> None:
        self.spared = None
        if not self._world.healed:
            self._world.net.heal_all()

    # -- two who make a topic

    def _make_twice(self, near: int) -> None:
        """The second one is refused because of the first, whose topic may come to nothing."""
        self._topics += 1
        name = f"twice-{self._topics}"
        for kind in ("normal", "fifo"):
            topic = pb.Topic(name=name, queues=1, type=kind)
            self._world.clients.ask(
                f"create topic {name} {kind}",
                Kind.CREATE_TOPIC,
                pb.CreateTopicRequest(topic=topic).SerializeToString(),
                partial(self._made, name),
                lost=lambda: None,
                timeout_ms=_PATIENCE_MS,
                proxy=near,
            )

    def _made(self, name: str, answer: bytes | PopmqError, unknown: int) -> None:
        if not isinstance(answer, PopmqError) or answer.code is Code.BAD_REQUEST:
            self._exist.add(name)
        else:
            self._world.tally.hit(States.MADE_IN_VAIN)

    def check_topics(self) -> None:
        """When all has healed: what somebody was told is there, is there."""
        for name in sorted(self._exist):
            body = pb.DescribeTopicRequest(name=name).SerializeToString()

            def heard(answer: bytes | PopmqError, unknown: int, name: str = name) -> None:
                if isinstance(answer, PopmqError) and answer.code is Code.TOPIC_NOT_FOUND:
                    self._world.oracle.report_violation("I1 no-loss", f"told to exist: {answer}")

            what = f"describe {name}"
            self._world.clients.ask(what, Kind.DESCRIBE_TOPIC, body, heard, lost=lambda: None)
        self._world.go(500)

    # -- a buffered group with two masters

    def _wait_for_successor(self, master: ClusterBroker, near: int) -> None:
        world = self._world
        if self.spared is None or world.healed:
            return
        if any(broker is not master for broker in world.masters):
            self._take_all(master, near, _ROUNDS)
        else:
            again = partial(self._wait_for_successor, master, near)
            world.time.after(_LOOK_MS, again)

    def _take_all(self, master: ClusterBroker, near: int, rounds: int) -> None:
        """From the successor, with an ack for each; then ask who was cut off."""
        world = self._world
        if self.spared is None or world.healed:
            return
        if not rounds:
            self._ask_old(master, near)
            return
        far = next((at for at, router in enumerate(world.routers) if at != near and router), None)
        if far is not None:
            taken = len(world.clients.held)
            self._receive(far)
            world.time.after(_LOOK_MS, partial(self._ack, taken, far))
        world.time.after(3 * _LOOK_MS, partial(self._take_all, master, near, rounds - 1))

    def _ack(self, taken: int, far: int) -> None:
        held = self._world.clients.held
        for history in [item for item in held[taken:] if item.reader is self._buffered]:
            self._world.clients.ack(history, proxy=far)
            held.remove(history)

    def _ask_old(self, master: ClusterBroker, near: int) -> None:
        world = self._world
        stories = self._buffered.stories.values()
        if master in world.masters and len(world.masters) > 1 and world.routers[near] is not None:
            acked = any(history.acked == 2 for history in stories)
            world.tally.hit(States.STALE_RECEIVE, int(acked))
            for _ in range(3):
                self._receive(near)

    def _receive(self, proxy: int) -> None:
        self._world.clients.receive(
            self._buffered, limit=16, invisible_ms=_INVISIBLE_MS, poll_ms=0, proxy=proxy
        )
