"""Sends dead letters back to their group, as retries with a fresh count of attempts."""

from dataclasses import dataclass

from popmq.broker.deliveries.message_group import lite_topic
from popmq.broker.deliveries.redriven_dead_letters import RedrivenDeadLetters
from popmq.broker.index.message_keys import KEY, names_in
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.meta.registry import Registry
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.record.message import RedrivenLetter, RevivalToken, StoredMessage
from popmq.common.topics import (
    GroupType,
    MessageType,
    SubscriptionGroup,
    TopicConfig,
    pull_retry_topic,
)


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Which dead letters are meant; what is None does not matter. Times in wall milliseconds,
    of when they became dead letters."""

    topic_id: int | None = None  # the first copy's
    tag_hash: int | None = None
    key: bytes | None = None
    after_ms: int = 0
    before_ms: int | None = None
    reason: str = ""  # as reason_of has it; empty: any

    def accepts(self, letter: StoredMessage) -> bool:
        origin = letter.token.topic_id if letter.token else None
        dead_ms = letter.header.wall_ms
        return (
            self.topic_id in (None, origin)
            and self.tag_hash in (None, letter.tag_hash)
            and dead_ms >= self.after_ms
            and (self.before_ms is None or dead_ms < self.before_ms)
            and (self.key is None or (KEY, self.key) in names_in(letter.properties))
            and self.reason in ("", reason_of(letter.token) if letter.token else "")
        )


def reason_of(token: RevivalToken) -> str:
    """Why a message became a dead letter, in words."""
    return token.reason.name.lower().replace("_", " ")


class RedriveService:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        redriven: RedrivenDeadLetters,
        max_lite_topics: int,
    ) -> None:
        self._max_lite_topics = max_lite_topics
        self._store = store
        self._registry = registry
        self._redriven = redriven
        self.redriven = 0

    def letter(self, letters: TopicConfig, offset: int) -> StoredMessage | None:
        """The dead letter; None when it is damaged. ColdRead instead of a wait for the disk."""
        (unit,) = self._store.queue(letters.id, 0).units(offset, 1, wait=False)
        (message,) = self._store.reader.read([unit], wait=False)
        return None if isinstance(message, DamagedMessage) else message

    def origin(self, letter: StoredMessage) -> TopicConfig | None:
        """The topic of its first copy, unless that was deleted."""
        return self._registry.topic_by_id(letter.token.topic_id) if letter.token else None

    def redrive(
        self, group: SubscriptionGroup, letters: TopicConfig, letter: StoredMessage
    ) -> None:
        """Append the copy; it counts when it is confirmed. The caller saw that the origin is
        there and that the letter was not redriven yet.

        It goes to the group's retry topic, where no other group gets it a second time.  A FIFO
        group reads none: its copies go to the end of the origin queue, for every group; and those
        of a lite topic to the end of that one, which is made again if it is gone.  A message that
        a pull consumer sent back goes to the retry topic which those pull.
        """
        origin, token = self.origin(letter), letter.token
        assert origin is not None, "a dead letter without a topic to go to"
        assert token is not None, "a dead letter without a token"
        offset = letter.header.queue_offset
        assert not self._redriven.has(letters.id, offset), f"letter {offset} twice"
        target, queue_id = origin, token.queue_id
        if origin.type is MessageType.LITE:
            name = lite_topic(letter.properties)
            queue_id = self._registry.lites.queue_of(origin, name, self._max_lite_topics)
        elif token.is_sent_back:
            target, queue_id = self._registry.internal_topic(pull_retry_topic(group.name)), 0
        elif group.type is not GroupType.FIFO:
            name = topics.retry_topic(group.name, origin.name)
            target, queue_id = self._registry.internal_topic(name), 0
        redriven = RedrivenLetter(letters.id, offset)
        named = RevivalToken(
            dead=False,
            ends=redriven,
            topic_id=token.topic_id,
            queue_id=token.queue_id,
            queue_offset=token.queue_offset,
            first_log_ms=0,  # not delivered since
        )
        stamp = self._store.stamp()
        self._store.put_message(
            topic_id=target.id,
            queue_id=queue_id,
            head=letter.head,
            properties=letter.properties,
            tag_hash=letter.tag_hash,
            token=named.encode(),
            stamp=stamp,
        )
        self._registry.lites.stored(target.id, queue_id, stamp.log_ms)
        self._redriven.apply(redriven)
        self.redriven += 1
