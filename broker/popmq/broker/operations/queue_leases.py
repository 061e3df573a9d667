"""QueueLeases: which consumer may process a queue in order, for a group whose members pull.

A lease is memory of the master.  Consumers trust theirs for TRUST_MS after the last answer, so a
master that does not know the leases of the one before grants none for SILENT_MS: then no consumer
trusts a lease that it did not give.  The very first master of a log knows that there are none.

Invariant: a queue of a group has one holder at a time, and nobody else gets it before the holder's
trust in it is over.
"""

from collections.abc import Iterable

from popmq.common.errors import TooManyRequests

LEASE_MS = 60_000  # RocketMQ's; a consumer renews every 20 s
TRUST_MS = 30_000  # how long a consumer goes on without an answer
SILENT_MS = TRUST_MS + 5_000  # an answer of the master before may have been on its way
LEASES_LIMIT = 100_000

Queue = tuple[str, int]  # topic and queue id


class QueueLeases:
    def __init__(self) -> None:
        self._leases: dict[tuple[str, Queue], tuple[str, int]] = {}  # holder, and until when
        self._silent_until_ms: int | None = None

    def lock(
        self, group: str, client: str, queues: Iterable[Queue], *, now_ms: int, first_master: bool
    ) -> list[Queue]:
        """Those of `queues` that the client holds from now on; it asks again for the others."""
        if self._silent_until_ms is None:
            self._silent_until_ms = now_ms if first_master else now_ms + SILENT_MS
        if now_ms < self._silent_until_ms:
            return []
        held = []
        for queue in queues:
            key = group, queue
            holder, until_ms = self._leases.get(key, (client, 0))
            if holder != client and now_ms < until_ms:
                continue
            if key not in self._leases and len(self._leases) >= LEASES_LIMIT:
                raise TooManyRequests(f"{LEASES_LIMIT} queues have a lease, which is the limit")
            self._leases[key] = client, now_ms + LEASE_MS
            held.append(queue)
        return held

    def unlock(self, group: str, client: str, queues: Iterable[Queue]) -> None:
        """Others may have those that the client holds, from now on."""
        for queue in queues:
            if self._leases.get((group, queue), ("", 0))[0] == client:
                del self._leases[group, queue]

    def is_ordered(self, group: str, now_ms: int) -> bool:
        """Whether a consumer of the group holds a queue here."""
        return any(
            holder == group and now_ms < until_ms
            for (holder, _), (_, until_ms) in self._leases.items()
        )

    def step(self, now_ms: int) -> None:
        """Forget leases that are over."""
        over = [key for key, (_, until_ms) in self._leases.items() if now_ms >= until_ms]
        for key in over:
            del self._leases[key]

    def check_invariants(self) -> None:
        assert len(self._leases) <= LEASES_LIMIT
