"""Ways to the brokers, by the name of their broker group (docs/concepts/proxy.md).

The routes come from the controllers; while they are away the last ones stay.  A broker group that
no controller lists any more keeps its way for a minute: receipt handles name it, and it may be
the controllers that are wrong.

The known groups are never the whole cluster for sure: a controller that has just started lists only
the groups that have registered since.  A group that is not known is Unavailable, not non-existent.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from popmq.common.clock import Clock
from popmq.common.errors import InvalidReceiptHandle, PopmqError, Unavailable
from popmq.common.protocol.messaging_payloads import Port
from popmq.common.record.receipt import broker_of
from popmq.common.topics import is_broker_name
from popmq.common.wire.controller_pb2 import BrokerAddress
from popmq.proxy.brokers.master_port import MasterPort, UsablePort
from popmq.proxy.brokers.route_watch import RouteWatch

logger = logging.getLogger(__name__)

KEEP_ABSENT_MS = 60_000
# The master of an earlier epoch is followed after so long without a newer one: the broker group was
# begun again, or restored from a backup.
NEWER_MASTER_MS = 10_000
IN_PROCESS = "in-process"  # the address of the broker of `popmq up`


class BrokerPorts(Protocol):
    def names(self) -> Sequence[str]:
        """Every broker group that is known now, sorted, whether or not it answers.

        There may be more: nothing that must stay the same (the place of a message group) and no
        final refusal may depend on this list.
        """
        ...

    def absent(self) -> Sequence[str]:
        """Broker groups of which no master has registered since the controllers started. What is
        asked of every group is asked of them, too, and refused by `port`."""
        ...

    def port(self, name: str) -> Port:
        """The way to that broker group; raises Unavailable when the group is not known now."""
        ...

    def awaited_port(self, name: str) -> Port:
        """As `port`, but requests to a group that is not known now wait for its route.

        Only for names from a topic's own list of groups: each name costs memory for a while.
        """
        ...

    def owner(self) -> str:
        """The broker group that owns topics and groups; empty while no controller has named it.

        A group that is alone in the routes need not be the owner: others may not have registered
        yet with controllers that have just started.
        """
        ...

    def when_owner_known(self, then: Callable[[], None]) -> Callable[[], None]:
        """Run `then` once the owner is known, at once if it is; the result cancels that."""
        ...

    def accepts_sends(self, name: str) -> bool:
        """Messages may be placed at that broker group; not while it is drained."""
        ...

    def has_master(self, name: str) -> bool:
        """A request to that broker group would leave now, as far as is known."""
        ...


def broker_of_handle(brokers: BrokerPorts, handle: bytes) -> tuple[str, Port]:
    """The broker group that a receipt handle names, and the way to it.

    Raises InvalidReceiptHandle, which makes a client give up, when no broker group can have that
    name, and Unavailable when the group is not known now: it may be absent, and come back.
    """
    name = broker_of(handle)
    if not is_broker_name(name):
        raise InvalidReceiptHandle(
            f"the receipt handle names broker group {name[:100]!r}, and no group can have that name"
        )
    return name, brokers.port(name)


class StaticBrokers:
    """Brokers that never change: the one-process cluster, and tests."""

    def __init__(self, ports: Mapping[str, Port]) -> None:
        self._ports = dict(sorted(ports.items()))

    def names(self) -> Sequence[str]:
        return tuple(self._ports)

    def absent(self) -> Sequence[str]:
        return ()

    def port(self, name: str) -> Port:
        try:
            return self._ports[name]
        except KeyError:
            raise Unavailable(f"broker group {name!r} is not known now") from None

    def awaited_port(self, name: str) -> Port:
        return self.port(name)

    def owner(self) -> str:
        return next(iter(self._ports), "")

    def when_owner_known(self, then: Callable[[], None]) -> Callable[[], None]:
        then()
        return lambda: None

    def accepts_sends(self, name: str) -> bool:
        return True

    def has_master(self, name: str) -> bool:
        return name in self._ports


def all_groups(brokers: BrokerPorts) -> Sequence[str]:
    """For what every broker group is asked: also those that are away, and the absent ones last."""
    return [*reachable_first(brokers, brokers.names()), *brokers.absent()]


def owner_first(brokers: BrokerPorts) -> Sequence[str]:
    """For what every broker group knows: the owner knows it first, the others by copies."""
    names, owner = brokers.names(), brokers.owner()
    return reachable_first(brokers, sorted(names, key=lambda name: name != owner))


def reachable_first(brokers: BrokerPorts, names: Sequence[str]) -> Sequence[str]:
    """The names in their order, but those without a master last."""
    return sorted(names, key=lambda name: not brokers.has_master(name))


class ClosablePort(UsablePort, Protocol):
    async def close(self) -> None: ...


class _Group:
    """A broker group's open way and, once no controller lists it any more, since when."""

    __slots__ = ("absent_since_ms", "address", "direct", "master", "way")

    def __init__(self, master: MasterPort) -> None:
        self.master = master
        self.way: ClosablePort | None = None
        self.address = ""  # empty: no controller has listed it yet
        self.direct = False  # the broker of this process, which nobody can replace
        self.absent_since_ms: int | None = None


class _NewestMaster(NamedTuple):
    epoch: int
    named_ms: int


class RoutedBrokers:
    """Follows the routes of every controller; `open_port(name, address)` opens a way.

    Of two controllers that name different masters the one with the later epoch is right.
    """

    def __init__(
        self,
        controllers: Sequence[Port],
        open_port: Callable[[str, str], ClosablePort],
        clock: Clock,
        on_new_master: Callable[[str], None] = lambda broker_group: None,
    ) -> None:
        """`on_new_master` gets a group that has another master, or the same one after a start."""
        self._open_port = open_port
        self._on_new_master = on_new_master
        self._clock = clock
        self._followed = [RouteWatch(controller, self._take) for controller in controllers]
        self._groups: dict[str, _Group] = {}
        self._names: tuple[str, ...] = ()
        self._absent: tuple[str, ...] = ()
        self._owner = ""
        self._wait_for_owner: dict[object, Callable[[], None]] = {}
        self._draining: frozenset[str] = frozenset()
        self._closing: set[asyncio.Task[None]] = set()
        # Of each broker group the highest epoch of a master, and when a controller named it last.
        self._newest: dict[str, _NewestMaster] = {}
        self.changed = asyncio.Event()  # set when routes arrived; a waiter clears it

    def names(self) -> Sequence[str]:
        return self._names

    def absent(self) -> Sequence[str]:
        return self._absent

    def port(self, name: str) -> Port:
        group = self._groups.get(name)
        if group is None and name in self._absent:
            raise Unavailable(
                f"broker group {name} is absent: no master of it has registered since the "
                "controllers started"
            )
        if group is None:
            raise Unavailable(
                f"broker group {name!r} is not known now: no controller lists it, so it is absent "
                "or does not exist"
            )
        return group.way if group.direct and group.way is not None else group.master

    def awaited_port(self, name: str) -> Port:
        if name not in self._groups:
            group = self._add(name)
            group.absent_since_ms = self._clock.boot_ms()
        return self.port(name)

    def owner(self) -> str:
        return self._owner

    def when_owner_known(self, then: Callable[[], None]) -> Callable[[], None]:
        key = object()
        if self._owner:
            then()
        else:
            self._wait_for_owner[key] = then
        return lambda: self._wait_for_owner.pop(key, None) and None

    def accepts_sends(self, name: str) -> bool:
        return name not in self._draining

    def has_master(self, name: str) -> bool:
        group = self._groups.get(name)
        return group is not None and group.master.has_master

    @property
    def retries(self) -> int:
        """How often a request was asked again, of all groups."""
        return sum(group.master.retries for group in self._groups.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for a master."""
        return sum(group.master.waiting for group in self._groups.values())

    def start(self) -> None:
        """Ask for routes until `stop`; must be called on the loop."""
        for followed in self._followed:
            followed.start()

    async def stop(self) -> None:
        for followed in self._followed:
            followed.stop()
        for name in list(self._groups):
            self._drop(name)
        if self._closing:
            await asyncio.wait(self._closing)

    def _take(self, route_watch: RouteWatch) -> None:
        """A controller answered: follow what all of them said last."""
        now_ms = self._clock.boot_ms()
        listed: dict[str, BrokerAddress] = {}
        # Of equal epochs the newest answer counts.
        for followed in (
            *(item for item in self._followed if item is not route_watch),
            route_watch,
        ):
            for name, route in followed.brokers.items():
                if name not in listed or route.epoch >= listed[name].epoch:
                    listed[name] = route
        self._owner = route_watch.owner or self._owner
        self._draining = frozenset(name for name, route in listed.items() if route.draining)
        for name, route in listed.items():
            if not self._is_older(name, route, now_ms):
                self._follow(name, route)
        for name, group in list(self._groups.items()):
            if name in listed:
                group.absent_since_ms = None
            elif group.absent_since_ms is None:
                group.absent_since_ms = now_ms
            elif now_ms - group.absent_since_ms > KEEP_ABSENT_MS:
                self._drop(name)
        self._names = tuple(sorted(name for name, group in self._groups.items() if group.address))
        absent = {name for item in self._followed for name in item.absent}
        self._absent = tuple(sorted(absent.difference(self._names)))
        self.changed.set()
        for name, route in listed.items():
            if self._is_older(name, route, now_ms):
                continue
            before = self._newest.get(name)
            self._newest[name] = _NewestMaster(route.epoch, now_ms)
            if before is not None and route.epoch > before.epoch:
                self._on_new_master(name)
        if self._owner:
            waiting, self._wait_for_owner = self._wait_for_owner, {}
            for then in waiting.values():
                then()

    def _is_older(self, name: str, route: BrokerAddress, now_ms: int) -> bool:
        """Whether this master was replaced by one that a controller named not long ago."""
        newest = self._newest.get(name)
        if newest is None or route.epoch >= newest.epoch:
            return False
        return now_ms - newest.named_ms < NEWER_MASTER_MS

    def _follow(self, name: str, route: BrokerAddress) -> None:
        group, address = self._groups.get(name), route.address
        if group is not None and group.address == address:
            return
        try:
            way = self._open_port(name, address)
        except PopmqError as error:  # one impossible address; the other routes are good
            logger.warning("broker cannot be used", extra={"broker": name, "reason": str(error)})
            return
        logger.info("broker in the routes", extra={"broker": name, "address": address})
        group = group or self._add(name)
        before, group.way, group.address = group.way, way, address
        group.direct = address == IN_PROCESS
        group.master.use(way)
        if before is not None:
            self._close(before)

    def _add(self, name: str) -> _Group:
        copies = partial(self._has_copies, name)
        group = self._groups[name] = _Group(
            MasterPort(name, self._clock, has_copies=copies, owner_is_away=self._owner_is_away)
        )
        return group

    def _has_copies(self, name: str) -> bool:
        return self._owner not in ("", name)

    def _owner_is_away(self) -> bool:
        return bool(self._owner) and not self.has_master(self._owner)

    def _drop(self, name: str) -> None:
        group = self._groups.pop(name)
        group.master.close(f"broker group {name} is not among the controllers' routes any more")
        if group.way is not None:
            self._close(group.way)

    def _close(self, way: ClosablePort) -> None:
        task = asyncio.get_running_loop().create_task(way.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
