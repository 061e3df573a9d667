"""The requests of one session with the master; after the first that fails it is over.

A reply that belongs to an older session is dropped, whatever it says (R10).
"""

import logging
from collections.abc import Callable

from popmq.common.disk import is_shortage
from popmq.common.errors import PopmqError
from popmq.common.protocol.messaging_payloads import Kind, Port

logger = logging.getLogger(__name__)

FIRST_REST_MS = 50
LONGEST_REST_MS = 1_000


class MasterSession:
    """`on_lost` is called once for each session that ends in trouble."""

    def __init__(
        self, port: Port, now_ms: Callable[[], int], *, on_lost: Callable[[], None]
    ) -> None:
        self._port = port
        self._now_ms = now_ms
        self._on_lost = on_lost
        self._session = 0  # counts them; 0 and everything older is over
        self._live = False
        self._asked: set[int] = set()
        self._rest_ms = FIRST_REST_MS
        self._not_before_ms = 0
        self._said = ""  # of trouble that goes on one line is enough

    def can_retry(self, now_ms: int) -> bool:
        return now_ms >= self._not_before_ms

    def begin(self) -> None:
        self._cancel()
        self._session += 1
        self._live = True

    def mark_healthy(self) -> None:
        """The session is worth keeping: the next trouble is a new one."""
        self._rest_ms = FIRST_REST_MS
        self._said = ""

    def request(
        self,
        kind: Kind,
        body: bytes,
        timeout_ms: int,
        on_reply: Callable[[bytes], None],
        on_refused: Callable[[PopmqError], None] | None = None,
    ) -> None:
        """`on_reply` hears the answer if the session is still the same then.

        An error ends the session, unless `on_refused` is there to hear of it.
        """
        session = self._session
        number = 0
        waiting = True

        def answered(reply: bytes | PopmqError) -> None:
            nonlocal waiting
            waiting = False
            self._asked.discard(number)
            if session != self._session or not self._live:
                return
            if isinstance(reply, PopmqError):
                if on_refused is not None:
                    on_refused(reply)
                else:
                    self.fail(f"{kind.name}: {reply}")
                return
            try:
                on_reply(reply)
            except PopmqError as error:  # it cannot be read
                self.fail(f"{kind.name}: {error}")
            except OSError as error:
                if not is_shortage(error):
                    raise
                self.fail(f"{kind.name}: {error}")

        number = self._port.request(kind, body, timeout_ms, answered)
        if waiting:  # else it was answered before this returned
            self._asked.add(number)

    def fail(self, reason: str) -> None:
        if not self._live:
            return
        if reason != self._said:
            logger.info("lost the master", extra={"reason": reason})
            self._said = reason
        self._cancel()
        self._not_before_ms = self._now_ms() + self._rest_ms
        self._rest_ms = min(2 * self._rest_ms, LONGEST_REST_MS)
        self._on_lost()

    def end(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        self._live = False
        asked, self._asked = self._asked, set()
        for number in asked:
            self._port.cancel(number)
