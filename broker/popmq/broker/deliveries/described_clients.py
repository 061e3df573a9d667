"""What proxies say of the clients that they heard: for people, `popmq clients` shows it.

Soft state beside the liveness of clients, outside the log and its hash: a broker that starts has
nothing and asks the proxies (docs/concepts/proxy.md).  The contents are never looked at here.

Invariant: `bytes` is the size of all contents, and at most BYTES_LIMIT.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from popmq.broker.deliveries.client_liveness import SILENCE_MS
from popmq.common.protocol.messaging_payloads import DESCRIPTION_BYTES
from popmq.common.quantities import MIB

DESCRIPTIONS_LIMIT = 20_000  # a client has one for each proxy that heard it lately
BYTES_LIMIT = 16 * MIB
KEEP_MS = 2 * SILENCE_MS  # Remoting clients that have nothing to do are silent for 30 s


class Description(NamedTuple):
    content: bytes
    heard_ms: int  # log time


class DescribedClients:
    def __init__(self) -> None:
        # By client id and proxy, in the order of hearing.
        self._items: OrderedDict[tuple[str, str], Description] = OrderedDict()
        self._proxies: dict[str, set[str]] = {}  # by client id
        self.bytes = 0

    def mark_seen(self, client_id: str, proxy: str, now_ms: int) -> bool:
        """Whether there is a description of it, which is kept for longer now."""
        known = self._items.get((client_id, proxy))
        if known is None:
            return False
        self._items[client_id, proxy] = known._replace(heard_ms=now_ms)
        self._items.move_to_end((client_id, proxy))
        return True

    def put(self, client_id: str, proxy: str, content: bytes, now_ms: int) -> None:
        """Keep it instead of what the proxy said before; nothing is kept where there is no room."""
        self.on_left(client_id, proxy)
        if len(self._items) >= DESCRIPTIONS_LIMIT or self.bytes + len(content) > BYTES_LIMIT:
            return
        self._items[client_id, proxy] = Description(content, now_ms)
        self._proxies.setdefault(client_id, set()).add(proxy)
        self.bytes += len(content)

    @property
    def has_room(self) -> bool:
        """For one more, however long."""
        fits = self.bytes + DESCRIPTION_BYTES <= BYTES_LIMIT
        return fits and len(self._items) < DESCRIPTIONS_LIMIT

    def on_left(self, client_id: str, proxy: str) -> None:
        """It is not at that proxy any more."""
        gone = self._items.pop((client_id, proxy), None)
        if gone is None:
            return
        self.bytes -= len(gone.content)
        proxies = self._proxies[client_id]
        proxies.discard(proxy)
        if not proxies:
            del self._proxies[client_id]

    def on_client_closed(self, client_id: str) -> None:
        """It said good-bye."""
        for proxy in list(self._proxies.get(client_id, ())):
            self.on_left(client_id, proxy)

    def forget(self, now_ms: int) -> None:
        """Drop those that no proxy heard lately."""
        while self._items:
            place, oldest = next(iter(self._items.items()))
            if now_ms - oldest.heard_ms <= KEEP_MS:
                return
            self.on_left(*place)

    def items(self, after: str = "") -> Sequence[tuple[str, Description]]:
        """With client ids, in their order, from behind that one on."""
        places = sorted(place for place in self._items if place[0] > after)
        return [(place[0], self._items[place]) for place in places]

    def check_invariants(self) -> None:
        sizes = sum(len(item.content) for item in self._items.values())
        assert self.bytes == sizes <= BYTES_LIMIT, "the size of the descriptions"
        places = {(client, proxy) for client, all in self._proxies.items() for proxy in all}
        assert places == self._items.keys(), "the proxies of each client"
