"""Which broker group is where: command in, routes out.

A route outlives its broker's silence: the log is still there, and receipt handles name the
broker group.  The version moves only when a route does, so that proxies can wait for it.
"""

import re
from dataclasses import dataclass

from popmq.common.errors import Code, ConfigError, Refused
from popmq.common.protocol.frames import Address
from popmq.common.topics import is_broker_name

BROKER_LIMIT = 1_024
ADDRESS_LIMIT = 300  # characters; a host name has at most 253
IN_PROCESS = "in-process"  # what `popmq up` registers instead of an address

_STORE_ID = re.compile(r"[a-zA-Z0-9_-]{0,100}")


@dataclass(frozen=True, slots=True)
class Route:
    broker: str
    address: str
    epoch: int
    store_id: str
    node: str = ""
    draining: bool = False


class Routes:
    """`first_version` differs from one run of the controller to the next, so that a proxy that
    followed the last one notices."""

    def __init__(self, cluster: str, *, dead_after_ms: int, first_version: int = 1) -> None:
        self._cluster = cluster
        self._dead_after_ms = dead_after_ms
        self._routes: dict[str, Route] = {}
        self._heard_ms: dict[str, int] = {}
        self._hidden: frozenset[str] = frozenset()
        self.version = first_version

    def register(self, cluster: str, route: Route, *, now_ms: int) -> bool:
        """Note that the broker is there; True when its route changed.

        Refuses another cluster's broker and what no proxy could use; a route of an older epoch
        than the known one, as that broker was replaced and does not know it yet; and a second
        broker of one name, unless the known one fell silent.
        """
        self.check(cluster, route)
        known = self._routes.get(route.broker)
        if known is not None and known != route:
            self._check_successor(known, route, now_ms=now_ms)
        self._heard_ms[route.broker] = now_ms
        return self.follow(route)

    def check(self, cluster: str, route: Route) -> None:
        """Raise for what cannot be, and for one group too many."""
        _check_route(route)
        if cluster != self._cluster:
            raise Refused(
                Code.BAD_REQUEST,
                f"broker {route.broker} is of cluster {cluster[:100]}, this controller of "
                f"{self._cluster} (cluster.name)",
            )
        if route.broker not in self._routes and len(self._routes) >= BROKER_LIMIT:
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"{BROKER_LIMIT} broker groups are registered, which is the limit",
            )

    def follow(self, route: Route) -> bool:
        """The route to a group from now on; True when it is another than before."""
        if self._routes.get(route.broker) == route:
            return False
        self._routes[route.broker] = route
        self.version += 1
        return True

    def _check_successor(self, known: Route, route: Route, *, now_ms: int) -> None:
        if known.store_id == route.store_id:
            if known.epoch > route.epoch:
                raise Refused(
                    Code.PRECONDITION_FAILED,
                    f"broker {route.broker} registers with epoch {route.epoch}, but epoch "
                    f"{known.epoch} is known",
                )
            return
        if known.broker not in self._heard_ms:  # it was a group of replicas, who are gone
            return
        silent_ms = self.silent_ms(known.broker, now_ms=now_ms)
        if silent_ms <= self._dead_after_ms:
            raise Refused(
                Code.PRECONDITION_FAILED,
                f"two brokers are called {route.broker}: store {known.store_id!r} at "
                f"{known.address}, whose last heartbeat came {silent_ms} ms ago, and store "
                f"{route.store_id!r} at {route.address}, which is refused: give it another "
                f"broker.name, or stop the first for {self._dead_after_ms} ms "
                "(controller.dead_after_ms)",
            )

    def get(self, broker: str) -> Route | None:
        return self._routes.get(broker)

    def is_heard(self, broker: str, *, now_ms: int) -> bool:
        """A broker without replicas registers under that name."""
        heard_ms = self._heard_ms.get(broker)
        return heard_ms is not None and now_ms - heard_ms <= self._dead_after_ms

    def hide(self, names: frozenset[str]) -> bool:
        """Proxies are not told of these; True when that is news."""
        if names == self._hidden:
            return False
        self._hidden = names
        self.version += 1
        return True

    def all(self) -> list[Route]:
        return [self._routes[name] for name in sorted(self._routes) if name not in self._hidden]

    @property
    def drained(self) -> list[str]:
        """Groups that take no new messages."""
        return [name for name, route in self._routes.items() if route.draining]

    @property
    def names(self) -> list[str]:
        """Of every group known, also of those that nobody is told of."""
        return sorted(self._routes)

    def silent_ms(self, broker: str, *, now_ms: int) -> int:
        """Milliseconds since the broker was last heard."""
        return now_ms - self._heard_ms[broker]


def check_broker_name(name: str) -> None:
    if not is_broker_name(name):
        raise Refused(
            Code.BAD_REQUEST, f"broker name {name[:100]!r} is not 1 to 100 letters, digits, _ or -"
        )


def _check_route(route: Route) -> None:
    """Raise BAD_REQUEST for what would break whoever follows it."""
    check_broker_name(route.broker)
    if route.node:
        check_broker_name(route.node)
    if not _STORE_ID.fullmatch(route.store_id):
        raise Refused(Code.BAD_REQUEST, f"broker {route.broker} registers an impossible store id")
    if route.address == IN_PROCESS:
        return
    if len(route.address) > ADDRESS_LIMIT:
        raise Refused(
            Code.BAD_REQUEST,
            f"broker {route.broker} registers an address of {len(route.address)} characters, "
            f"the limit is {ADDRESS_LIMIT}",
        )
    try:
        Address.parse(route.address)
    except ConfigError as error:
        raise Refused(Code.BAD_REQUEST, f"broker {route.broker}: {error}") from error
