"""Which broker group is where: command in, routes out.

A route outlives its broker's silence: the log is still there, and receipt handles name the
broker group.  The version moves only when a route does, so that proxies can wait for it.
"""

from dataclasses import dataclass

from popmq.common.errors import Code, Refused

BROKER_LIMIT = 1_024


@dataclass(frozen=True, slots=True)
class Route:
    broker: str
    address: str
    epoch: int
    store_id: str


class Routes:
    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._routes: dict[str, Route] = {}
        self._heard_ms: dict[str, int] = {}
        self.version = 1

    def register(self, cluster: str, route: Route, *, now_ms: int) -> bool:
        """Note that the broker is there; True when its route changed.

        Refuses another cluster's broker, and a route of an older epoch than the known one:
        that broker was replaced and does not know it yet.
        """
        if cluster != self._cluster:
            raise Refused(
                Code.BAD_REQUEST,
                f"broker {route.broker} is of cluster {cluster}, this controller of "
                f"{self._cluster} (cluster.name)",
            )
        known = self._routes.get(route.broker)
        if known is None and len(self._routes) >= BROKER_LIMIT:
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"{BROKER_LIMIT} broker groups are registered, which is the limit",
            )
        if known is not None and known.store_id == route.store_id and known.epoch > route.epoch:
            raise Refused(
                Code.PRECONDITION_FAILED,
                f"broker {route.broker} registers with epoch {route.epoch}, but epoch "
                f"{known.epoch} is known",
            )
        self._heard_ms[route.broker] = now_ms
        if known == route:
            return False
        self._routes[route.broker] = route
        self.version += 1
        return True

    def all(self) -> list[Route]:
        return [self._routes[name] for name in sorted(self._routes)]

    def silent_ms(self, broker: str, *, now_ms: int) -> int:
        """Milliseconds since the broker was last heard."""
        return now_ms - self._heard_ms[broker]
