"""What a broker must offer to be measured beside the others: one small adapter each."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from bench.peers.processes import Process
from popmq.cli.load.consuming import ConsumeStats
from popmq.cli.load.reactor import Reactor
from popmq.cli.load.sending import Sender
from popmq.common.errors import PopmqError

QUEUES = 8


class NotAvailable(PopmqError):
    """This peer cannot be set up here; the text says why and is printed in the report."""


class Peer(Protocol):
    """`start` raises NotAvailable; the others raise LoadError.

    `warm_up` is how many messages it gets before anything is measured.  `settings` says what it
    was told to do, for the report.
    """

    name: str
    settings: str
    warm_up: int

    @abstractmethod
    def start(self, folder: Path) -> None: ...

    @abstractmethod
    def processes(self) -> Sequence[Process]: ...

    @abstractmethod
    def lanes(self, reactor: Reactor, connections: int, body: int) -> Sequence[Sender]: ...

    @abstractmethod
    def stored(self) -> int:
        """How many messages it has stored since its start, from its own offsets."""

    @abstractmethod
    def consume(
        self, reactor: Reactor, connections: int, loops: int, seconds: float, *, acks: str
    ) -> ConsumeStats | None:
        """Receive 32 and ack each, over and over; None: not measured for this peer."""

    @abstractmethod
    def stop(self) -> None: ...
