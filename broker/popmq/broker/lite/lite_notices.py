"""LiteNotices: subscriptions to lite topics that ended at the server, of which their clients are
to hear (docs/concepts/lite-topics.md).

Best effort, sent once: to the first proxy that says the client listens to it.  A client that misses
it says its subscription again, which then counts.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

NOTICES_LIMIT = 100_000  # names of all clients; those that wait longest are dropped
EXPIRY_MS = 60_000  # by then a client has said anew what it wants
_NONE: AbstractSet[str] = frozenset()


class _WaitingNotices:
    __slots__ = ("names", "since_ms")

    def __init__(self, since_ms: int) -> None:
        self.names: dict[str, None] = {}
        self.since_ms = since_ms


class LiteNotices:
    def __init__(self) -> None:
        self._waiting: OrderedDict[int, _WaitingNotices] = OrderedDict()  # by client, oldest first
        self._count = 0

    def add(self, client: int, names: Iterable[str], now_ms: int) -> None:
        waiting = self._waiting.setdefault(client, _WaitingNotices(now_ms))
        before = len(waiting.names)
        waiting.names.update(dict.fromkeys(names))
        self._count += len(waiting.names) - before
        while self._count > NOTICES_LIMIT:
            self.take(next(iter(self._waiting)))

    def of(self, client: int) -> AbstractSet[str]:
        """The pending notices."""
        waiting = self._waiting.get(client)
        return waiting.names.keys() if waiting is not None else _NONE

    def forget(self, client: int, names: Iterable[str]) -> None:
        """It wants these again."""
        waiting = self._waiting.get(client)
        if waiting is None:
            return
        for name in waiting.names.keys() & set(names):
            del waiting.names[name]
            self._count -= 1

    def take(self, client: int) -> Sequence[str]:
        """Removes and returns the pending notices."""
        waiting = self._waiting.pop(client, None)
        if waiting is None:
            return ()
        self._count -= len(waiting.names)
        return list(waiting.names)

    def step(self, now_ms: int) -> None:
        while self._waiting:
            client, oldest = next(iter(self._waiting.items()))
            if now_ms - oldest.since_ms < EXPIRY_MS:
                break
            self.take(client)
