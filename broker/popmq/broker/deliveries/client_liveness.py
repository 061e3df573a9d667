"""Which clients were heard of lately: what auto-renew rests on (D6).

Soft state, outside the log and its hash: proxies report each second whom they heard, and a
broker that starts gives everybody 30 s, once.  Renewal itself writes nothing.
"""

from collections import OrderedDict
from collections.abc import Iterator

from popmq.common.record.message import tag_hash

SILENCE_MS = 30_000
CLIENT_LIMIT = 200_000
NAMES_LIMIT = 20_000


def client_number(client_id: str) -> int:
    """64 bits that stand for a client in check points."""
    return tag_hash(client_id)


def attempt_number(attempt_id: str) -> int:
    """32 bits that stand for a receive's attempt id in check points of FIFO groups."""
    return tag_hash(attempt_id) & 0xFFFF_FFFF or 1


class ClientNames:
    """The ids behind the numbers, as far as they were heard lately: for people, and soft."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, str] = OrderedDict()
        self._numbers: dict[str, int] = {}  # one object for all check points of a client

    def number(self, client_id: str) -> int:
        known = self._numbers.get(client_id)
        if known is not None:
            return known
        number = self._numbers[client_id] = client_number(client_id)
        self._names[number] = client_id
        if len(self._names) > NAMES_LIMIT:
            self._numbers.pop(self._names.popitem(last=False)[1], None)
        return number

    def items(self) -> Iterator[tuple[int, str]]:
        return iter(list(self._names.items()))

    def name(self, number: int) -> str:
        return self._names.get(number) or f"#{number:016x}"


class ClientLiveness:
    def __init__(self) -> None:
        # A plain dict looks past all that was ever deleted to find its first.
        self._heard_ms: OrderedDict[int, int] = OrderedDict()
        self._grace_until_ms = 0

    def start_grace(self, now_ms: int) -> None:
        """Nobody could be heard while the broker was away: everyone counts as alive for 30 s."""
        self._grace_until_ms = now_ms + SILENCE_MS

    def mark_seen(self, client: int, now_ms: int) -> None:
        """Kept in the order of hearing; at the bound the one silent for longest is forgotten."""
        self._heard_ms[client] = now_ms
        self._heard_ms.move_to_end(client)
        if len(self._heard_ms) > CLIENT_LIMIT:
            self._heard_ms.popitem(last=False)

    def on_client_closed(self, client: int) -> None:
        """It said good-bye."""
        self._heard_ms[client] = -SILENCE_MS

    def is_alive(self, client: int, now_ms: int) -> bool:
        heard_ms = self._heard_ms.get(client)
        if heard_ms is None:
            return now_ms < self._grace_until_ms
        return now_ms - heard_ms <= SILENCE_MS

    def forget(self, now_ms: int) -> None:
        """Drop those who are silent for longer than matters."""
        while self._heard_ms:
            client, heard_ms = next(iter(self._heard_ms.items()))
            if now_ms - heard_ms <= 2 * SILENCE_MS:
                return
            del self._heard_ms[client]
