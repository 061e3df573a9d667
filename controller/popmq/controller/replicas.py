"""The brokers of one group as their heartbeats describe them: command in, refusal or news out.

What is here is hearsay and decides nothing about safety (that is the record's compare-and-set,
R1): it says who can be asked, who seems dead, and who would lose least.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from popmq.common.errors import Code, Refused
from popmq.common.protocol.group_record import TimerCheckPoint
from popmq.common.wire import controller_pb2 as pb

MEMBER_LIMIT = 16  # stores of one group

Role = pb.BrokerRole
SERVING = (Role.OPENING, Role.MASTER, Role.HANDING_OVER)


@dataclass(frozen=True, slots=True)
class ReplicaHeartbeat:
    """One heartbeat. `epoch` is the accepted one, positions are bytes of log."""

    node: str
    store_id: str
    address: str
    epoch: int = 0
    end: int = 0
    confirmed: int = 0
    role: int = Role.NOBODY
    priority: int = 0
    replicas: int = 3
    min_in_sync: int = 0
    catch_up_from: int = 0
    catch_up_to: int = 0
    meta_version: int = 0
    draining: bool = False
    tables_equal_at: int = 0
    tables_differ_at: int = 0
    tables_hash_at: int = 0  # the newest difference; tables_differ_at is the first one
    tables_hash: str = ""
    asks_rebuild: int = pb.NO_REBUILD
    shortage: str = ""  # what its machine lacks

    @property
    def is_empty(self) -> bool:
        return self.epoch == 0 and self.end == 0


class _Heard:
    """A replica and when it was heard; `gone` since its address answered like a closed door."""

    __slots__ = ("heard_ms", "idle_since_ms", "refused_connection", "replica")

    def __init__(self, replica: ReplicaHeartbeat, now_ms: int) -> None:
        self.replica = replica
        self.heard_ms = now_ms
        self.refused_connection = False
        self.idle_since_ms: int | None = None if replica.role in SERVING else now_ms


def _idles_on(before: _Heard, now: _Heard) -> bool:
    """A new epoch is a new order, which has not been idled over yet."""
    idle = None not in (before.idle_since_ms, now.idle_since_ms)
    return idle and before.replica.epoch == now.replica.epoch


class Replicas:
    def __init__(self, group: str, *, dead_after_ms: int) -> None:
        self._group = group
        self._dead_after_ms = dead_after_ms
        self._heard: dict[str, _Heard] = {}
        self.timer_check_point: TimerCheckPoint | None = None
        self.furthest_end = 0  # of any that was ever heard

    def register(self, replica: ReplicaHeartbeat, *, now_ms: int) -> None:
        """Take a heartbeat.  One of an epoch that its store has left is passed over.

        Refuses a second store under a node's name, and a second process on one store, unless the
        known one fell silent: acks are counted by store id.
        """
        self._check_alone(replica, now_ms=now_ms)
        known = self._heard.get(replica.store_id)
        if known is not None and replica.epoch < known.replica.epoch:
            return
        for other in [heartbeat for heartbeat in self if heartbeat.node == replica.node]:
            if other.store_id != replica.store_id:
                del self._heard[other.store_id]
        self._make_room(replica, now_ms=now_ms)
        connected = _Heard(replica, now_ms)
        if known is not None and _idles_on(known, connected):
            connected.idle_since_ms = known.idle_since_ms
        self._heard[replica.store_id] = connected
        self.furthest_end = max(self.furthest_end, replica.end)

    def _check_alone(self, replica: ReplicaHeartbeat, *, now_ms: int) -> None:
        for other in self:
            same = [other.node == replica.node, other.store_id == replica.store_id]
            if not any(same) or other.address == replica.address:
                continue
            if not self.alive(other.store_id, now_ms=now_ms):
                continue
            raise Refused(
                Code.PRECONDITION_FAILED,
                f"broker group {self._group}: node {replica.node} with store {replica.store_id} at "
                f"{replica.address} is refused, because node {other.node} with store "
                f"{other.store_id} at {other.address} sent a heartbeat "
                f"{self.silent_ms(other.store_id, now_ms=now_ms)} ms ago: a node's name "
                "(broker.node) and a data directory belong to one process; stop the other for "
                f"{self._dead_after_ms} ms (controller.dead_after_ms)",
            )

    def _make_room(self, replica: ReplicaHeartbeat, *, now_ms: int) -> None:
        if replica.store_id in self._heard or len(self._heard) < MEMBER_LIMIT:
            return
        silent = max(self, key=lambda heartbeat: self.silent_ms(heartbeat.store_id, now_ms=now_ms))
        if self.alive(silent.store_id, now_ms=now_ms):
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"broker group {self._group} has {MEMBER_LIMIT} brokers, which is the limit",
            )
        del self._heard[silent.store_id]

    def take_timers(self, check_point: TimerCheckPoint) -> None:
        if check_point.is_newer_than(self.timer_check_point):
            self.timer_check_point = check_point

    def mark_suspect(self, store_id: str) -> None:
        """Nobody listens at its address any more: it counts as dead until it is heard again."""
        if store_id in self._heard:
            self._heard[store_id].refused_connection = True

    def extend_deadlines(self, ms: int) -> None:
        """We were not there for so long ourselves: it is nobody's silence."""
        for connected in self._heard.values():
            connected.heard_ms += ms
            if connected.idle_since_ms is not None:
                connected.idle_since_ms += ms

    def __iter__(self) -> Iterator[ReplicaHeartbeat]:
        return iter(
            sorted(
                (replica.replica for replica in self._heard.values()),
                key=lambda replica: replica.node,
            )
        )

    def __len__(self) -> int:
        return len(self._heard)

    def get(self, store_id: str) -> ReplicaHeartbeat | None:
        connected = self._heard.get(store_id)
        return connected.replica if connected else None

    def node(self, name: str) -> ReplicaHeartbeat | None:
        return next((heartbeat for heartbeat in self if heartbeat.node == name), None)

    def name(self, store_id: str) -> str:
        """The node with that store, for people."""
        heartbeat = self.get(store_id)
        return heartbeat.node if heartbeat else f"store {store_id}"

    def alive(self, store_id: str, *, now_ms: int) -> bool:
        connected = self._heard.get(store_id)
        silent = connected is None or connected.refused_connection
        return not silent and self.silent_ms(store_id, now_ms=now_ms) <= self._dead_after_ms

    def alive_replicas(self, *, now_ms: int) -> list[ReplicaHeartbeat]:
        return [heartbeat for heartbeat in self if self.alive(heartbeat.store_id, now_ms=now_ms)]

    def silent_ms(self, store_id: str, *, now_ms: int) -> int:
        """Milliseconds since that store was last heard; it must be known."""
        return now_ms - self._heard[store_id].heard_ms

    def idle_ms(self, store_id: str, *, now_ms: int) -> int:
        """For how long it has said that it serves nobody."""
        since_ms = self._heard[store_id].idle_since_ms
        return 0 if since_ms is None else now_ms - since_ms

    @property
    def min_in_sync(self) -> int:
        """The strictest that a broker of the group is set to."""
        return max(
            (replica.min_in_sync or max(1, replica.replicas - 1) for replica in self), default=1
        )
