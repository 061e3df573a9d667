"""ConnectionLimits: what one connection may take of what receives and pulls of all clients share.

A client id costs nothing, so both limits count by connection (docs/security.md).
"""

from collections import OrderedDict

from popmq.common.clock import Clock
from popmq.common.errors import TooManyRequests
from popmq.common.protocol.messaging_payloads import FilterType
from popmq.common.quantities import KIB
from popmq.common.settings.settings import Settings
from popmq.proxy.transport.token_bucket import TokenBucket

# At most what a broker keeps compiled: what is known here is seldom compiled there again.
_KNOWN_FILTERS, _KNOWN_BYTES = 256, 128 * KIB
_BURST_S = 10  # of new filters: a process with many consumers has just started
_CONNECTIONS = 20_000


class ConnectionLimits:
    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._limit = settings.poll.waiters
        self._waiting = 0
        self._waiting_of: dict[str, int] = {}
        self._per_s = settings.pop.sql_filters_per_s
        self._clock = clock
        self._known: OrderedDict[int, int] = OrderedDict()  # sizes of expressions by hash
        self._known_bytes = 0
        self._rates: OrderedDict[str, TokenBucket] = OrderedDict()

    def begin_wait(self, connection: str) -> None:
        """A connection waits with at most as many as there is room left for others: so one alone
        gets half, and however many there are, the next one gets some."""
        held, left = self._waiting_of.get(connection, 0), self._limit - self._waiting
        if held >= left:
            raise TooManyRequests(
                f"{held} receives of this connection wait already, and this proxy has room for "
                f"{left} more (poll.waiters: {self._limit}); a connection takes at most half of it"
            )
        self._waiting_of[connection] = held + 1
        self._waiting += 1

    def end_wait(self, connection: str) -> None:
        self._waiting -= 1
        left = self._waiting_of[connection] - 1
        if left:
            self._waiting_of[connection] = left
        else:
            del self._waiting_of[connection]

    def check_filter(self, connection: str, filter_type: FilterType, expression: str) -> None:
        """Raise for a connection that has a broker compile too many SQL filters."""
        if filter_type is not FilterType.SQL:
            return
        number = hash(expression)
        if number in self._known:
            self._known.move_to_end(number)
            return
        rate = self._rates.setdefault(connection, TokenBucket(self._per_s, self._per_s * _BURST_S))
        self._rates.move_to_end(connection)
        if len(self._rates) > _CONNECTIONS:
            self._rates.popitem(last=False)
        if not rate.take(self._clock.boot_ms()):
            raise TooManyRequests(
                f"this connection uses more than {self._per_s} SQL filters a second that are new "
                "here (pop.sql_filters_per_s)"
            )
        self._known[number] = len(expression)
        self._known_bytes += len(expression)
        while len(self._known) > _KNOWN_FILTERS or self._known_bytes > _KNOWN_BYTES:
            self._known_bytes -= self._known.popitem(last=False)[1]
