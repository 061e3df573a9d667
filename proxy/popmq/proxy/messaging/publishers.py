"""Publishers: which clients with an open telemetry stream publish to which topics.

A client says so in its settings, or by sending a half message: official clients whose stream was
renewed may be silent about their topics for minutes.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

logger = logging.getLogger(__name__)

CLIENTS_LIMIT = 100_000
TOPICS_LIMIT = 1_000  # of one client


class CommandStream(Protocol):
    def send(self, command: bytes) -> None: ...


class Publishers:
    def __init__(self, streams_of: Callable[[str], Sequence[CommandStream]]) -> None:
        self._streams_of = streams_of
        self._topics: OrderedDict[str, dict[str, None]] = OrderedDict()  # by client id
        self._clients: dict[str, OrderedDict[str, None]] = {}  # by topic, next to be told first
        self._known: frozenset[str] | None = None

    def set_topics(self, client_id: str, topics: Iterable[str]) -> None:
        """The client's settings name these topics and no others."""
        names = list(dict.fromkeys(topics))
        if len(names) > TOPICS_LIMIT:
            logger.warning(
                "a client is asked about its first topics only",
                extra={"client": client_id, "topics": len(names), "limit": TOPICS_LIMIT},
            )
        self._forget(client_id)
        for topic in names[:TOPICS_LIMIT]:
            self._add(client_id, topic)

    def add_topic(self, client_id: str, topic: str) -> None:
        """It sent a half message to that topic."""
        if client_id and len(self._topics.get(client_id, ())) < TOPICS_LIMIT:
            self._add(client_id, topic)

    def changed(self) -> None:
        """A stream was opened or has ended."""
        self._known = None

    def topics(self) -> frozenset[str]:
        """What the clients that are connected now publish to."""
        if self._known is None:
            here = (topics for one, topics in self._topics.items() if self._streams_of(one))
            self._known = frozenset(topic for topics in here for topic in topics)
        return self._known

    def send_command(self, topic: str, command: bytes) -> bool:
        """Send it to one that publishes to the topic, each in turn; False when none is here."""
        clients = self._clients.get(topic, OrderedDict())
        for client_id in list(clients):
            clients.move_to_end(client_id)
            streams = self._streams_of(client_id)
            if streams:
                streams[-1].send(command)
                return True
        return False

    def _add(self, client_id: str, topic: str) -> None:
        self._known = None
        self._topics.setdefault(client_id, {})[topic] = None
        self._topics.move_to_end(client_id)
        self._clients.setdefault(topic, OrderedDict())[client_id] = None
        if len(self._topics) > CLIENTS_LIMIT:
            self._forget(next(iter(self._topics)))

    def _forget(self, client_id: str) -> None:
        self._known = None
        for topic in self._topics.pop(client_id, {}):
            clients = self._clients[topic]
            del clients[client_id]
            if not clients:
                del self._clients[topic]
