"""LiteNotices: notices for clients whose subscriptions to lite topics the server ended
(docs/concepts/lite-topics.md).

Best effort: a notice is sent once, to the first proxy that reports the client as listening.  A
client that misses a notice subscribes again, and the server accepts that subscription.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

NOTICES_LIMIT = 100_000  # topic names of all clients; beyond it the oldest notices are dropped
EXPIRY_MS = 60_000  # by then a client has renewed its subscriptions
_NONE: AbstractSet[str] = frozenset()


class _PendingNotices:
    __slots__ = ("names", "since_ms")

    def __init__(self, since_ms: int) -> None:
        self.names: dict[str, None] = {}
        self.since_ms = since_ms


class LiteNotices:
    def __init__(self) -> None:
        self._pending: OrderedDict[int, _PendingNotices] = OrderedDict()  # by client, oldest first
        self._count = 0

    def add(self, client: int, names: Iterable[str], now_ms: int) -> None:
        pending = self._pending.setdefault(client, _PendingNotices(now_ms))
        before = len(pending.names)
        pending.names.update(dict.fromkeys(names))
        self._count += len(pending.names) - before
        while self._count > NOTICES_LIMIT:
            self.take(next(iter(self._pending)))

    def of(self, client: int) -> AbstractSet[str]:
        """The lite topics of the client's pending notices."""
        pending = self._pending.get(client)
        return pending.names.keys() if pending is not None else _NONE

    def forget(self, client: int, names: Iterable[str]) -> None:
        """Drop the notices of `names`, to which the client subscribed again."""
        pending = self._pending.get(client)
        if pending is None:
            return
        for name in pending.names.keys() & set(names):
            del pending.names[name]
            self._count -= 1

    def take(self, client: int) -> Sequence[str]:
        """Remove and return the lite topics of the client's pending notices."""
        pending = self._pending.pop(client, None)
        if pending is None:
            return ()
        self._count -= len(pending.names)
        return list(pending.names)

    def step(self, now_ms: int) -> None:
        """Drop the notices of clients whose oldest one has waited for EXPIRY_MS."""
        while self._pending:
            client, oldest = next(iter(self._pending.items()))
            if now_ms - oldest.since_ms < EXPIRY_MS:
                break
            self.take(client)
