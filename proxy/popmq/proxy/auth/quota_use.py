"""QuotaUse: what one user uses of its quotas at this proxy: connections, calls and bytes a second.

Its topics, groups and queues are counted by their owner (broker/meta/registry.py).  A user without
quotas has no QuotaUse.
"""

from collections.abc import Callable, Iterable

from popmq.common.clock import Clock
from popmq.common.errors import Code
from popmq.common.users import Quotas
from popmq.proxy.auth.identity import AccessRefused
from popmq.proxy.transport.interface import Call, ForwardedCall
from popmq.proxy.transport.token_bucket import TokenBucket

PEERS_KEPT_MS = 1_000


class OpenPeers:
    """The addresses of open connections, as the ports of this process list them: not over grpcio,
    so the quota of connections does not count there."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ports: list[Callable[[], Iterable[str]]] = []
        self._known: frozenset[str] = frozenset()
        self._until_ms = 0

    def add_port(self, peers: Callable[[], Iterable[str]]) -> None:
        self._ports.append(peers)

    def now(self) -> frozenset[str]:
        """As of at most PEERS_KEPT_MS ago: the list of many connections is long."""
        now_ms = self._clock.boot_ms()
        if now_ms >= self._until_ms:
            self._known = frozenset(peer for peers in self._ports for peer in peers())
            self._until_ms = now_ms + PEERS_KEPT_MS
        return self._known


class QuotaUse:
    def __init__(self, user: str, quotas: Quotas, clock: Clock, peers: OpenPeers) -> None:
        self._user = user
        self.quotas = quotas
        self._clock = clock
        self._peers = peers
        self._connected: set[str] = set()  # at most as many as the quota
        self._calls = TokenBucket(quotas.calls, quotas.calls)
        self._bytes = TokenBucket(quotas.bytes, quotas.bytes)

    def admit(self, call: Call, request_bytes: int) -> Call:
        """Count a call; what its answer goes to. Raises AccessRefused, and then counts nothing."""
        quotas, now_ms = self.quotas, self._clock.boot_ms()
        if quotas.connections:
            self._check_connection(call.peer)
        if quotas.calls and not self._calls.has_any(now_ms):
            raise self._refusal("calls", "makes more calls a second than its quota")
        if quotas.bytes and not self._bytes.has_any(now_ms):
            raise self._refusal("bytes", "sends and receives more bytes a second than its quota")
        if quotas.connections:
            self._connected.add(call.peer)
        self._calls.spend(1)
        if not quotas.bytes:
            return call
        self.spend_bytes(request_bytes)
        return _MeteredCall(call, self)

    def spend_bytes(self, count: int) -> None:
        self._bytes.spend(count)

    def _check_connection(self, peer: str) -> None:
        if peer in self._connected or len(self._connected) < self.quotas.connections:
            return
        self._connected &= self._peers.now()
        if len(self._connected) >= self.quotas.connections:
            raise self._refusal(
                "connections",
                f"has {len(self._connected)} connections at this proxy, and one more is over its "
                "quota",
            )

    def _refusal(self, name: str, what: str) -> AccessRefused:
        return AccessRefused(
            Code.TOO_MANY_REQUESTS,
            f"quota_{name}",
            f"user {self._user} {what} ({self.quotas.setting(self._user, name)})",
            user=self._user,
        )


class _MeteredCall(ForwardedCall):
    def __init__(self, call: Call, use: QuotaUse) -> None:
        super().__init__(call)
        self._use = use

    def send(self, message: bytes) -> None:
        self._use.spend_bytes(len(message))
        self._call.send(message)
