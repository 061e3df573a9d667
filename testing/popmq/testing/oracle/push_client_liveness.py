"""PushClientLiveness: which push consumers were heard of, so that what they hold must stay with
them.

Log times are upper bounds of what passed, so "it lives" is certain; soft state of the product
only makes it live longer (30 s of grace after a start).
"""

from popmq.testing.oracle.client_history import Held

SILENCE_MS = 30_000  # after which a client counts as gone
LOOK_MS = 5_000  # between two looks at what a client keeps


class PushClientLiveness:
    def __init__(self) -> None:
        self._heard_ms: dict[str, int] = {}
        self._silent_ms: dict[str, int] = {}  # when it was last found to have been silent
        self._gone: set[str] = set()
        self._left_ms: dict[str, int] = {}  # its last good-bye

    def heard(self, client_id: str, log_ms: int) -> None:
        last = self._heard_ms.get(client_id, log_ms)
        if log_ms - last > SILENCE_MS or client_id in self._gone:
            self._silent_ms[client_id] = log_ms
        self._gone.discard(client_id)
        self._heard_ms[client_id] = log_ms

    def gone(self, client_id: str, log_ms: int) -> None:
        self._gone.add(client_id)
        self._left_ms[client_id] = log_ms

    def left(self, held: Held) -> bool:
        """Whether its client said good-bye since: then it is back at once."""
        return self.left_since(held.renewed_by, held.asked_log_ms)

    def left_since(self, client_id: str, log_ms: int) -> bool:
        return self._left_ms.get(client_id, -1) >= log_ms

    def keeps(self, held: Held, log_ms: int) -> bool:
        """Whether the delivery's client has been alive ever since, so that it may not end."""
        client_id = held.renewed_by
        if not client_id or client_id in self._gone or held.superseded or self.left(held):
            return False
        fresh = log_ms - self._heard_ms.get(client_id, -SILENCE_MS) < SILENCE_MS
        return fresh and self._silent_ms.get(client_id, -1) <= held.asked_log_ms

    def silence_ms(self, held: Held) -> int:
        """How much longer than its invisible time a delivery may stay, when nobody is heard."""
        # A key of a FIFO group waits for all that was delivered of it.
        waits = held.renewed_by or (held.reader.group.fifo and self._heard_ms)
        return SILENCE_MS + LOOK_MS if waits else 0
