"""Publishers: which clients with an open telemetry stream are asked about half messages of a topic.

Those that sent half messages to the topic, and only on streams from the address that they sent
from: settings that merely name a topic show nobody its messages (docs/security.md).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

CLIENTS_LIMIT = 100_000
TOPICS_LIMIT = 1_000  # of one client; it is asked about the first ones only
NAMES_LIMIT = 500_000  # of all clients together


class Sender(NamedTuple):
    """A client at an address; one that reconnects from there is the same."""

    client_id: str
    host: str


class CommandStream(Protocol):
    peer: str

    @property
    def user(self) -> str:
        """That opened it; empty while callers need not be users."""
        ...

    def send(self, command: bytes) -> None: ...


class PublishRights(Protocol):
    """Who may see a half message (auth/gate.py): a client id is what a client claims."""

    @property
    def version(self) -> object:
        """Another one after each change."""
        ...

    def may_publish(self, user: str, topic: str, peer: str) -> bool: ...


class Publishers:
    def __init__(
        self, streams_of: Callable[[Sender], Sequence[CommandStream]], rights: PublishRights
    ) -> None:
        self._streams_of = streams_of
        self._rights = rights
        self._rights_version: object = None  # at which `_known` was made
        self._topics: OrderedDict[Sender, dict[str, None]] = OrderedDict()
        self._senders: dict[str, OrderedDict[Sender, None]] = {}  # by topic, next to be asked first
        self._names = 0  # in `_topics`
        self._known: frozenset[str] | None = None

    def add_topic(self, sender: Sender, topic: str) -> None:
        """It sent a half message to that topic."""
        named = self._topics.setdefault(sender, {})
        self._topics.move_to_end(sender)
        if topic in named or len(named) >= TOPICS_LIMIT:
            return
        self._known = None
        self._names += 1
        named[topic] = None
        self._senders.setdefault(topic, OrderedDict())[sender] = None
        while len(self._topics) > CLIENTS_LIMIT or self._names > NAMES_LIMIT:
            self._forget(next(iter(self._topics)))

    def changed(self) -> None:
        """A stream was opened or has ended."""
        self._known = None

    def topics(self) -> frozenset[str]:
        """What the clients that are connected now publish to, and may."""
        version = self._rights.version
        if self._known is None or self._rights_version != version:
            self._rights_version = version
            self._known = frozenset(
                topic
                for sender, topics in self._topics.items()
                for topic in topics
                if self._stream_for(sender, topic) is not None
            )
        return self._known

    def _stream_for(self, sender: Sender, topic: str) -> CommandStream | None:
        """The newest one whose user may publish to the topic."""
        for stream in reversed(self._streams_of(sender)):
            if self._rights.may_publish(stream.user, topic, stream.peer):
                return stream
        return None

    def send_command(self, topic: str, command: bytes) -> bool:
        """Send it to one that publishes to the topic, each in turn; False when none is here."""
        senders = self._senders.get(topic, OrderedDict())
        for sender in list(senders):
            senders.move_to_end(sender)
            stream = self._stream_for(sender, topic)
            if stream is not None:
                stream.send(command)
                return True
        return False

    def _forget(self, sender: Sender) -> None:
        self._known = None
        topics = self._topics.pop(sender)
        self._names -= len(topics)
        for topic in topics:
            senders = self._senders[topic]
            del senders[sender]
            if not senders:
                del self._senders[topic]
