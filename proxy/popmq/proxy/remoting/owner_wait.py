"""OwnerWait: one request that waits at the broker group which owns topics, again and again."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from popmq.common.errors import PopmqError
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.proxy.brokers.broker_ports import BrokerPorts

logger = logging.getLogger(__name__)

WAIT_MS = 1_000
TIMEOUT_MS = 3_000
LOOK_S = 0.1


class OwnerWait(ABC):
    """While it runs, `ask_owner` is called whenever no request waits at the owner of now."""

    def __init__(self, brokers: BrokerPorts) -> None:
        self._brokers = brokers
        self._waiting: tuple[str, Callable[[], None]] | None = None  # at which broker group
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def ask_owner(self) -> None:
        """Send the request with `wait_at`, unless there is nothing to ask for now."""

    def start(self) -> None:
        """Ask the owner from now on; must be called on the loop."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.cancel()

    @property
    def runs(self) -> bool:
        return self._timer is not None

    def ask_again(self) -> None:
        if self._waiting is None and self.runs:
            self.ask_owner()

    def wait_at(
        self,
        owner: str,
        port: Port,
        kind: Kind,
        body: bytes,
        answered: Callable[[bytes | PopmqError], None],
    ) -> None:
        over = False

        def first(answer: bytes | PopmqError) -> None:
            nonlocal over
            over = True
            self._waiting = None
            answered(answer)

        number = port.request(kind, body, TIMEOUT_MS, first)
        if not over:
            self._waiting = owner, lambda: port.cancel(number)

    def cancel(self) -> None:
        """Give up the request that waits."""
        if self._waiting is not None:
            _, cancel = self._waiting
            self._waiting = None
            cancel()

    def look(self) -> None:
        """Each LOOK_S: the request belongs at the owner of now."""
        if self._waiting is not None and self._waiting[0] != self._brokers.owner():
            self.cancel()
        self.ask_again()

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)
        try:
            self.look()
        except Exception:
            # The next tick tries again: nothing is lost for good.
            logger.exception("%s cannot ask the owner", type(self).__name__)
