"""The same bytes to two servers, one with lanes and one without: both must do the same.

A server is what `popmq up` is, without sockets: connections, proxy, brokers, logs.  Bytes go in
turn by turn, cut anywhere; after each turn the frames that brokers were sent, the answers of every
stream and the connections' own frames are compared, and in the end the logs.

    cd tests && python -m proxy.lane_world --turns 200000 [--seed N]
"""

import argparse
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import count

from proxy.lane_client import BROKERS, GROUP, ORDERED, TOPICS, Client

from popmq.common.errors import Unavailable
from popmq.common.protocol.messaging_payloads import Kind, OnReply, Port
from popmq.common.settings.lean_settings import LeanSettings
from popmq.common.settings.settings import Settings, TopicSettings
from popmq.common.topics import GroupType, MessageType, Permission, TopicConfig
from popmq.common.users import AuthMode
from popmq.common.wire.meta_pb2 import FollowUsersReply
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.bounds import LeanCounters
from popmq.proxy.transport.lean.connection import LeanConnection
from popmq.proxy.transport.lean.inbox import SharedInflow
from popmq.proxy.transport.lean.messages import InflationTurns
from popmq.testing.harness.core_broker import SMALL, CoreBroker
from proxy import lane_users

CONNECTIONS = 3
TURNS_OF_A_WORLD = 300
TYPES = {"fifo": MessageType.FIFO, "mixed": MessageType.MIXED}
Put = tuple[str, Kind, bytes]
# Few streams, so that `max_streams` is reached.
FEW_STREAMS = replace(SMALL, lean=replace(SMALL.lean, max_streams=40))


@dataclass
class Asked:
    """A request that waits for its broker."""

    core: CoreBroker
    kind: Kind
    body: bytes
    on_reply: OnReply
    id: int = 0


class WaitingPort:
    """Requests reach the broker when the world says so; some are refused or broken at once."""

    def __init__(self, server: "Server", name: str, settings: Settings) -> None:
        self.core = CoreBroker(settings=settings)
        self._server, self._name = server, name
        self.waiting: dict[int, Asked] = {}
        self._numbers: Iterator[int] = count(1)
        self.refuses = self.breaks = False
        self.timeouts_ms: list[int] = []  # of what waits or waited
        for topic in TOPICS:
            kind = TYPES.get(topic, MessageType.NORMAL)
            self.core.broker.registry.create_topic(TopicConfig(0, topic, 4, kind))
        self.core.group(GROUP)
        self.core.group(ORDERED, type=GroupType.FIFO)

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        number = next(self._numbers)
        self.timeouts_ms.append(timeout_ms)
        if kind in (Kind.PUT, Kind.ACK):
            self._server.asked.append((self._name, kind, body))
        if self.refuses:
            on_reply(Unavailable("the broker is away"))
        elif self.breaks and kind in (Kind.PUT, Kind.ACK):
            on_reply(b"\0\0")  # no result at all
        else:
            self.waiting[number] = Asked(self.core, kind, body, on_reply)
        return number

    def cancel(self, request_id: int) -> None:
        if self.waiting.pop(request_id, None) is None:
            self._server.cancelled += 1

    def serve(self) -> None:
        while self.waiting:
            asked = self.waiting.pop(next(iter(self.waiting)))
            self.core.server.request(asked.kind, asked.body, 10_000, asked.on_reply)
        self.core.run_until_idle()


class Brokers(StaticBrokers):
    """Some may have no route, no master, or are drained."""

    def __init__(self, ports: dict[str, WaitingPort]) -> None:
        super().__init__(ports)
        self._now = ports
        self.without_route: Collection[str] = ()
        self.without_master: Collection[str] = ()
        self.drained: Collection[str] = ()

    def names(self) -> Sequence[str]:
        return tuple(name for name in super().names() if name not in self.without_route)

    def port(self, name: str) -> Port:
        if name in self.without_route:
            raise Unavailable(f"broker group {name!r} is not known now")
        return self._now[name] if name in self._now else super().port(name)

    def has_master(self, name: str) -> bool:
        return name not in self.without_master and super().has_master(name)

    def accepts_sends(self, name: str) -> bool:
        return name not in self.drained


class Server:
    def __init__(
        self,
        *,
        lanes: bool,
        names: Sequence[str],
        settings: Settings = FEW_STREAMS,
        tight: bool = False,
    ) -> None:
        """`tight`: its brokers take smaller messages than the proxy lets pass."""
        self.asked: list[Put] = []
        self.cancelled = 0
        self.soon: list[Callable[[], None]] = []
        of_brokers = settings
        if tight:
            message = replace(settings.message, max_body_bytes=1, max_properties_bytes=1_024)
            store = replace(settings.store, segment_bytes=10 << 10)
            of_brokers = replace(settings, message=message, store=store)
        self.ports = {name: WaitingPort(self, name, of_brokers) for name in sorted(names)}
        self.brokers = Brokers(self.ports)
        self.clock = next(iter(self.ports.values())).core.clock
        self.limits = replace(settings.lean, lanes=lanes)
        settings = replace(settings, lean=self.limits)
        self.proxy = Proxy(settings, self.brokers, self.clock, soon=self.soon.append)
        self.proxy.access.users.replace_keys(lane_users.sealing_keys())
        self.encrypted = False
        self.methods = {method.path: method for method in self.proxy.methods()}
        self.counters = LeanCounters()
        self.shared = SharedInflow(self.limits, InflationTurns(self.soon.append))
        self.connections = [self.connect() for _ in range(CONNECTIONS)]

    def connect(self) -> LeanConnection:
        connection = LeanConnection(
            self.methods,
            self.limits,
            self.counters,
            self.clock.boot_ms,
            lambda: None,
            self.shared,
            "10.0.0.9:999",
        )
        connection.encrypted = self.encrypted
        return connection

    def follow(self, users: FollowUsersReply) -> None:
        access = self.proxy.access
        access._answered(access.users.apply(users))

    def end_turn(self) -> None:
        for callback in self.soon:  # those that come meanwhile are met too
            callback()
        self.soon.clear()

    def serve(self) -> None:
        for port in self.ports.values():
            port.serve()
        self.end_turn()

    def calls(self, path: str) -> int:
        """How many calls that path served."""
        counts = self.proxy.metrics.calls_by_path
        return sum(count for (_, by), count in counts.items() if by == path)

    def log(self) -> list[bytes]:
        stores = [port.core.broker.store for port in self.ports.values()]
        return [store.record_bytes(store.start, store.end - store.start) for store in stores]

    def advance(self, ms: int) -> None:
        for port in self.ports.values():
            port.core.advance(ms)


def settings_of(chance: random.Random) -> Settings:
    """Some with bounds that are reached."""
    lean = LeanSettings(
        max_streams=chance.choice((40, 40, 6)),
        max_header_bytes=chance.choice((32, 32, 4)) << 10,
        max_unsent_bytes=chance.choice((64 << 20, 64 << 10)),
        max_resets_per_s=chance.choice((1_000, 1_000, 2)),
        max_control_per_s=chance.choice((5_000, 5_000, 50)),
        stream_window_bytes=chance.choice((1 << 20, 1 << 20, 1 << 20, 300)),
        connection_window_bytes=chance.choice((8 << 20, 8 << 20, 8 << 20, 70_000)),
        compress_bytes=chance.choice((0, 0, 1, 60)),
    )
    message = replace(
        SMALL.message, max_body_bytes=12_000, max_properties=6, max_properties_bytes=2_000
    )
    topic = TopicSettings(auto_create=chance.random() < 0.3)
    return replace(SMALL, lean=lean, message=message, topic=topic)


class World:
    """`turn` raises AssertionError as soon as the two servers differ."""

    def __init__(self, seed: int, brokers: int = 1) -> None:
        self.chance = chance = random.Random(seed)
        settings, names = settings_of(chance), BROKERS[:brokers]
        tight = chance.random() < 0.3
        self.with_lanes, self.without = self.servers = [
            Server(lanes=lanes, names=names, settings=settings, tight=tight)
            for lanes in (True, False)
        ]
        # Requests to a broker are not shared by calls with other timeouts, so a server with lanes
        # may ask in another order then: what is left of them stays alike.
        self.timeouts: tuple[str, ...] = ("60S", "7H", "20000000H", "")
        self.passing_ms: tuple[int, ...] = (40, 500, 2_000, 2_000, 61_000)
        if chance.random() < 0.5:
            self.timeouts, self.passing_ms = ("3S", "2999m"), (5, 61_000)
        self.users = seed % 3 == 0
        self.users_version = 0
        if self.users:
            self._change_users()
        self.clients = [self._client() for _ in range(CONNECTIONS)]
        for server in self.servers:
            server.encrypted = self.users
            server.connections = [server.connect() for _ in range(CONNECTIONS)]

    def _client(self) -> Client:
        chance = self.chance
        coding = chance.choice(("indexed", "plain", "huffman"))
        return Client(
            random.Random(chance.getrandbits(64)),
            coding,
            self.timeouts,
            widens=chance.random() < 0.5,
            gathers=chance.random() < 0.3,
            user=chance.choice((*lane_users.NAMES, "ann", "ann", "")) if self.users else "",
            prioritizes=chance.random() < 0.3,
            steady=chance.random() < 0.3,
            accepts=chance.choice(("", "identity", "gzip")),
        )

    def turn(self) -> None:
        chance = self.chance
        for number, client in enumerate(self.clients):
            for _ in range(chance.randrange(5)):
                steps = client.send, client.ack, client.receive, client.change, client.other
                chance.choices(steps, (60, 30, 4, 2, 6))[0]()
            data = client.take()
            for server in self.servers:
                server.connections[number].receive(data, server.clock.boot_ms())
        if chance.random() < 0.05:
            self._event()
        served, late = chance.random() < 0.8, chance.random() < 0.02
        refuses, breaks = chance.random() < 0.02, chance.random() < 0.005
        passed_ms = chance.choice(self.passing_ms)
        for server in self.servers:
            for port in server.ports.values():
                port.refuses, port.breaks = refuses, breaks
            server.end_turn()
            if served:
                server.serve()
            if late:
                server.advance(passed_ms)
                for connection in server.connections:
                    connection.tick(server.clock.boot_ms())
        self.compare()

    def _event(self) -> None:
        """Something that happens to a server, and not by its clients."""
        chance = self.chance
        number, name = chance.randrange(CONNECTIONS), chance.choice(TOPICS)
        away = chance.choice((*[()] * 6, *((name,) for name in self.with_lanes.ports)))
        permission = chance.choice((*[Permission.READ_WRITE] * 4, Permission.READ))
        kind = chance.randrange(10)
        for server in self.servers:
            connection = server.connections[number]
            match kind:
                case 0:
                    connection.drain("it is time")
                case 1:
                    connection.retire("it is old")
                case 2:
                    connection.lost()
                    server.connections[number] = server.connect()
                case 3:
                    server.brokers.without_master = away
                case 4:
                    server.brokers.drained = away
                case 5:
                    for port in server.ports.values():
                        registry = port.core.broker.registry
                        topic = registry.topic(name)
                        registry.alter_topic(replace(topic, permission=permission))
                        port.core.run_until_idle()
                case 6:  # deleted, and made again
                    for port in server.ports.values():
                        registry = port.core.broker.registry
                        topic = registry.delete_topic(name)
                        port.core.run_until_idle()
                        registry.create_topic(replace(topic, id=0))
                        port.core.run_until_idle()
                case 7:
                    server.brokers.without_route = away
                case 8:  # new ways, to the same brokers
                    for broker, port in tuple(server.ports.items()):
                        server.ports[broker] = copy(port)
        if kind == 2:
            self.clients[number] = self._client()
        elif kind == 9 and self.users:
            self._change_users()

    def _change_users(self) -> None:
        """Also to no users at all, and back."""
        self.users_version += 1
        mode = self.chance.choice((AuthMode.ON, AuthMode.ON, AuthMode.OBSERVE, AuthMode.OFF))
        users = lane_users.users_reply(self.users_version, mode)
        for server in self.servers:
            server.follow(users)

    def finish(self) -> None:
        for server in self.servers:
            server.serve()
            server.serve()
        self.compare()
        assert self.with_lanes.log() == self.without.log(), "the logs differ"
        for server in self.servers:
            for connection in server.connections:
                connection.lost()
            assert server.counters.streams == 0

    def compare(self) -> None:
        ours, theirs = self.with_lanes, self.without
        assert ours.asked == theirs.asked, "the brokers were asked otherwise"
        assert ours.cancelled == theirs.cancelled
        ours.asked.clear()
        theirs.asked.clear()
        counts = ours.counters, theirs.counters
        assert counts[0] == counts[1], "the transports counted otherwise"
        metrics = ours.proxy.metrics, theirs.proxy.metrics
        assert metrics[0].sends == metrics[1].sends
        assert metrics[0].acks == metrics[1].acks
        assert metrics[0].refused == metrics[1].refused
        assert metrics[0].auth_refused == metrics[1].auth_refused
        assert metrics[0].auth_observed == metrics[1].auth_observed
        for number, client in enumerate(self.clients):
            pair = ours.connections[number], theirs.connections[number]
            output = by_stream(pair[0].outbox.take())
            assert output == by_stream(pair[1].outbox.take()), "the answers differ"
            assert pair[0].done == pair[1].done
            client.hear(output)
            if pair[0].done:
                for server in (ours, theirs):
                    server.connections[number] = server.connect()
                self.clients[number] = self._client()

    def calls(self, path: str) -> int:
        return self.with_lanes.calls(path)


def by_stream(data: bytes) -> dict[int, list[frames.Frame]]:
    """The frames of each stream in their order; those of the connection are of stream 0."""
    result: dict[int, list[frames.Frame]] = {}
    reader = frames.Http2FrameReader(1 << 24)
    for frame in reader.feed(data):
        result.setdefault(frame[2], []).append(frame)
    assert not reader.held_bytes, "an answer ends inside a frame"
    return result


def run(seed: int, turns: int) -> Counter[str]:
    """What calls were served by. World N has seed + N, and one or two brokers in turns."""
    calls: Counter[str] = Counter()
    done = worlds = 0
    while done < turns:
        own = seed + worlds
        world = World(own, 1 + own % 2)
        try:
            for _ in range(min(turns - done, TURNS_OF_A_WORLD)):
                world.turn()
                done += 1
            world.finish()
        except BaseException:
            print(f"the world of seed {own} fails after {done} turns: --turns 300 --seed {own}")
            raise
        for (method, path), number in world.with_lanes.proxy.metrics.calls_by_path.items():
            calls[f"{method} {path}"] += number
        worlds += 1
    print(f"{done} turns of {worlds} worlds from seed {seed}: no difference")
    for name, number in sorted(calls.items()):
        print(f"  {number:>9} {name}")
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.disable()  # of the faults of a broker, which are many
    run(given.seed, given.turns)


if __name__ == "__main__":
    main()
