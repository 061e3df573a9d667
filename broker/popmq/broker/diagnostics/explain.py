"""Explain: what became of a message for a group, in exactly one named state, with its proof.

A message's life begins at its first copy and goes on in retry copies, whose tokens name the
place of the first one; it may end as a dead letter, and go on from there when that is redriven.
The newest copy counts.  Nothing here waits or changes anything.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from popmq.broker.deliveries.check_point_table import DeliveryStatus
from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.deliveries.message_group import message_group
from popmq.broker.deliveries.pop_check_point import AUTO_RENEW, PopCheckPoint, ReviveKind
from popmq.broker.deliveries.queue_progress import FifoProgress, QueueProgress
from popmq.broker.diagnostics.delivery_evidence import (
    DeliveryRecord,
    Evidence,
    GroupQueueOffset,
    ParkedKeySkip,
    gather,
)
from popmq.broker.diagnostics.explanation import (
    Explanation,
    HoldOf,
    Proof,
    State,
    StoredCopy,
    over,
    skipped,
)
from popmq.broker.diagnostics.fifo_block_reason import FifoBlockReason
from popmq.broker.filter.recent_filters import RecentFilters
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.meta.offset_record import OffsetReason
from popmq.broker.meta.registry import Registry
from popmq.broker.operations.resumable_reads import ResumableRead, confirmed, read
from popmq.broker.store.lookup import Lookup
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.record.message import StoredMessage
from popmq.common.topics import MessageType, StartAt, SubscriptionGroup, TopicConfig

_TRIES = 3
TTL_OVER = "its time to live (user property TTL_MS) was over before a receive could take it"


class Explainer:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        deliveries: Deliveries,
        lookup: Lookup,
        filters: RecentFilters,
    ) -> None:
        self._store = store
        self._registry = registry
        self._table = deliveries.table
        self._lookup = lookup
        self.holds: list[HoldOf] = [FifoBlockReason(self._table)]
        self._filters = filters
        self._redriven = deliveries.redriven

    def readers(self, topic: TopicConfig) -> list[SubscriptionGroup]:
        """Every group that ever read the topic, by name, and the one whose retries it has."""
        ids = {place[0] for place, _ in self._table.progress_items() if place[1] == topic.id}
        groups = [self._registry.group_by_id(group_id) for group_id in ids]
        owner = self._registry.find_group(topics.group_of_pull_retry(topic.name))
        if owner not in groups:
            groups.append(owner)
        return sorted(
            (group for group in groups if group is not None), key=lambda group: group.name
        )

    def explain(
        self, first: StoredCopy, group: SubscriptionGroup, message_id: str
    ) -> ResumableRead[Explanation]:
        """What became of the message whose first copy is `first`."""
        for left in reversed(range(_TRIES)):
            explanation = yield from self._explain(first, group, message_id, last_try=not left)
            if explanation.state is not State.UNKNOWN:
                break  # else a record that was written meanwhile may say more
        return explanation

    def _explain(
        self, first: StoredCopy, group: SubscriptionGroup, message_id: str, *, last_try: bool
    ) -> ResumableRead[Explanation]:
        evidence = yield from self._evidence(first, group)
        explanation = self._at_place(first, group, evidence)
        if explanation is None or explanation.state not in (
            State.READY,
            State.BLOCKED,
            State.INVISIBLE,
        ):
            copy = yield from self._newest_copy(first, group, message_id)
            last = evidence.last
            if copy is not None and (last is None or copy.message.header.position > last.position):
                return (yield from self._explain_copy(first, copy, group))
        if explanation is None and last_try:
            explanation = self._passed_over_again(first, group, evidence)
        if explanation is None:
            explanation = _unknown(first, group, evidence)
        explanation.proofs.insert(0, first.proof)
        return explanation

    def _explain_copy(
        self, first: StoredCopy, copy: StoredCopy, group: SubscriptionGroup
    ) -> ResumableRead[Explanation]:
        token, header = copy.message.token, copy.message.header
        assert token is not None, "a copy without a token"
        if token.dead:
            then = (
                f"stays in {copy.topic.name} until it expires; `popmq dlq redrive {group.name}` "
                "sends it back"
            )
            # Of a group that keeps order the copy is a message of its own, for every group.
            if self._redriven.has(copy.topic.id, header.queue_offset):
                then = "was sent back to the end of its queue, as a message that is told by itself"
            explanation = Explanation(
                group.name,
                State.DEAD_LETTERED,
                header.wall_ms,
                copy.message.attempt,
                f"became a dead letter after attempt {copy.message.attempt}: "
                + token.reason.name.lower().replace("_", " "),
                then,
            )
        else:
            evidence = yield from self._evidence(copy, group)
            explanation = self._at_place(copy, group, evidence) or _unknown(copy, group, evidence)
        explanation.proofs[:0] = [first.proof, copy.proof]
        return explanation

    def _evidence(self, copy: StoredCopy, group: SubscriptionGroup) -> ResumableRead[Evidence]:
        place = copy.place(group)
        progress = self._progress(place)
        if not self._has_ended(copy) and (progress is None or _is_unread(progress, place.offset)):
            return Evidence()
        ck = _open_at(progress, place.offset) if progress is not None else None
        # Log time never goes back, so its record and those about it stand from then on.
        popped_ms = ck.popped_at_ms if ck is not None else None
        position = copy.message.header.position
        yield from confirmed(self._store)
        evidence = yield from gather(self._store, place, position=position, popped_ms=popped_ms)
        for skip in reversed(evidence.skips):
            if (yield from self._is_about(skip, copy)):
                return replace(evidence, skips=[skip]).after_last_rewind(place.offset)
        return replace(evidence, skips=[]).after_last_rewind(place.offset)

    def _is_about(self, skip: ParkedKeySkip, copy: StoredCopy) -> ResumableRead[bool]:
        """Whether the word was about the copy's message group; one whose message is gone may be."""
        header = copy.message.header
        if skip.key_offset == header.queue_offset:
            return True

        def look() -> list[StoredMessage | DamagedMessage]:
            queue = self._store.queue(header.topic_id, header.queue_id)
            if skip.key_offset < queue.min_offset:
                return []
            units = queue.units(skip.key_offset, 1, wait=False)
            return self._store.reader.read(units, wait=False)

        named = yield from read(look)
        return all(
            isinstance(message, DamagedMessage) or _line(message) == _line(copy.message)
            for message in named
        )

    def _newest_copy(
        self, first: StoredCopy, group: SubscriptionGroup, message_id: str
    ) -> ResumableRead[StoredCopy | None]:
        """The last retry copy, redriven copy or dead letter of this first copy."""
        header = first.message.header
        origin = (header.topic_id, header.queue_id, header.queue_offset)
        newest: StoredCopy | None = None
        for name in (
            topics.retry_topic(group.name, first.topic.name),
            topics.parked_topic(group.name, first.topic.name),
            topics.dlq_topic(group.name),
        ):
            topic = self._registry.find_topic(name)
            if topic is None:
                continue
            look = partial(self._lookup.by_id, topic.id, message_id, wait=False)
            findings = yield from read(look)
            for message in findings.messages:
                token = message.token
                if token is None or origin != (token.topic_id, token.queue_id, token.queue_offset):
                    continue
                position = message.header.position
                if newest is None or position > newest.message.header.position:
                    newest = StoredCopy(message, topic)
        return newest

    # -- one place

    def _progress(self, place: GroupQueueOffset) -> QueueProgress | None:
        return self._table.progress(place.group_id, place.topic_id, place.queue_id)

    def _has_ended(self, copy: StoredCopy) -> bool:
        """Whether its lite topic was removed, with every group's place in it."""
        header = copy.message.header
        if copy.topic.type is not MessageType.LITE:
            return False
        lite = self._registry.lites.at(header.topic_id, header.queue_id)
        return lite is None or header.queue_offset < lite.first

    def _attempt(self, copy: StoredCopy, group: SubscriptionGroup) -> int:
        """The attempt that the copy stands for; in a FIFO group it counts where it stands."""
        place = copy.place(group)
        progress = self._progress(place)
        ended = progress.attempts.get(place.offset, 0) if isinstance(progress, FifoProgress) else 0
        return topics.first_attempt(copy.topic.name, copy.message.attempt) + ended

    def _at_place(
        self, copy: StoredCopy, group: SubscriptionGroup, evidence: Evidence
    ) -> Explanation | None:
        """The state of a copy by its place and what was found; None when its life went on
        elsewhere, or nobody can say."""
        place = copy.place(group)
        progress = self._progress(place)
        if not self._has_ended(copy) and (progress is None or _is_unread(progress, place.offset)):
            return self._unread(copy, group, begun=progress is not None)
        ck = _open_at(progress, place.offset) if progress is not None else None
        if ck is not None and ck.buffered:
            return self._buffered(copy, group, ck)
        last = evidence.last
        skip = evidence.skipped(place.offset)
        word = evidence.skips[-1] if evidence.skips else None
        if last is None:
            return self._passed_over(copy, group, evidence)
        proofs = _handed_proofs(evidence)
        ended = evidence.delivery_ends.get(last.key)
        fate = self._table.fate(*last.key, last.member)
        attempt = self._attempt(copy, group)
        if fate is DeliveryStatus.WAITING:
            return self._invisible(copy, group, last, proofs)
        if ended is not None:
            proofs.append(Proof(ended.name, ended.position, ended.wall_ms))
        if fate is DeliveryStatus.ACKED or (ended is not None and ended.kind == ReviveKind.ACK):
            ended_ms = ended.wall_ms if ended else 0
            text = f"acked as attempt {attempt}"
            return over(group, State.ACKED, ended_ms, attempt, text, proofs)
        if ended is not None and ended.kept:
            text = f"it failed as attempt {attempt}, and stays the dead letter that it is"
            return over(group, State.DEAD_LETTERED, ended.wall_ms, attempt, text, proofs)
        if ended is not None and ended.kind == ReviveKind.LOST:
            text = "its body could not be read when it was to be revived"
            return over(group, State.LOST, ended.wall_ms, attempt, text, proofs)
        if word is not None and word.position > last.position:
            return skipped(group, word, attempt, proofs)
        if skip is not None and skip.position > last.position:
            proofs.append(Proof("reset", skip.position, skip.wall_ms, f"to {skip.offset}"))
            text = "an operator's reset ended its delivery and passed over it"
            return over(group, State.SKIPPED, skip.wall_ms, attempt, text, proofs)
        return None

    def _unread(self, copy: StoredCopy, group: SubscriptionGroup, *, begun: bool) -> Explanation:
        header = copy.message.header
        queue = self._store.queue(header.topic_id, header.queue_id)
        attempt = self._attempt(copy, group)
        progress = self._progress(copy.place(group))
        # What an ordered group was given comes back in its place: retention keeps it alive.
        kept = isinstance(progress, FifoProgress) and header.queue_offset in progress.attempts
        if header.queue_offset < queue.min_offset and not kept:
            text = "it went by retention before the group read it"
            return over(group, State.EXPIRED, 0, attempt, text, [])
        if not begun and group.start_at is StartAt.NEWEST and not self._reads(copy, group):
            text = "the group never read the topic and starts at the newest message"
            return over(group, State.SKIPPED, 0, attempt, text, [])
        if expired_ms := self._store.reader.expired_at_ms(copy.message):
            return over(group, State.EXPIRED, expired_ms, attempt, TTL_OVER, [])
        for hold_of in self.holds:
            hold = hold_of(copy, group)
            if hold is not None:
                return Explanation(
                    group.name,
                    hold.state,
                    hold.since_ms,
                    attempt,
                    hold.text,
                    hold.next_step_text,
                    hold.until_log_ms,
                )
        return Explanation(
            group.name,
            State.READY,
            header.wall_ms,
            attempt,
            "nobody has it",
            f"a receive whose filter accepts it gets it as attempt {attempt}",
        )

    def _reads(self, copy: StoredCopy, group: SubscriptionGroup) -> bool:
        topic = copy.topic
        places = (
            self._table.progress(group.id, topic.id, q) for q in self._registry.queue_ids(topic)
        )
        return topics.is_retry_topic(topic.name) or any(places)

    def _passed_over(
        self, copy: StoredCopy, group: SubscriptionGroup, evidence: Evidence
    ) -> Explanation | None:
        """The group reads behind it, and no check point holds it."""
        if not evidence.complete:
            return None
        header, attempt = copy.message.header, copy.message.attempt
        if evidence.skips:
            return skipped(group, evidence.skips[-1], attempt, [])
        done = evidence.committed(header.queue_offset)
        skip = evidence.skipped(header.queue_offset)
        if done is not None and (skip is None or done.position < skip.position):
            text = "acked, or passed over by a filter: buffered check points leave no record of it"
            proof = Proof("committed", done.position, done.wall_ms, f"to {done.offset}")
            return over(group, State.ACKED, done.wall_ms, attempt, text, [proof])
        if skip is not None and skip.reason is OffsetReason.PULLED:
            text = f"a pull consumer set the group's offset to {skip.offset}, behind it"
            proof = Proof("offset", skip.position, skip.wall_ms, f"to {skip.offset}")
            return over(group, State.ACKED, skip.wall_ms, attempt, text, [proof])
        if skip is not None:
            start = skip.reason is OffsetReason.START_AT_NEWEST
            proof = Proof(
                "start" if start else "reset", skip.position, skip.wall_ms, f"to {skip.offset}"
            )
            text = "the group began behind it" if start else "an operator's reset passed over it"
            return over(group, State.SKIPPED, skip.wall_ms, attempt, text, [proof])
        if self._has_ended(copy):
            text = "its lite topic ended before a receive of the group took it"
            return over(group, State.EXPIRED, 0, attempt, text, [])
        passed_ms = evidence.passed_at_ms
        keeps_ms = copy.topic.retention_ms or self._store.retention_ms
        queue = self._store.queue(header.topic_id, header.queue_id)
        if header.queue_offset < queue.min_offset and (
            not passed_ms or passed_ms - header.wall_ms >= keeps_ms
        ):
            text = "it went by retention before the group read it"
            return over(group, State.EXPIRED, passed_ms, attempt, text, [])
        return self._not_taken(copy, group, attempt, passed_ms, [])

    def _passed_over_again(
        self, copy: StoredCopy, group: SubscriptionGroup, evidence: Evidence
    ) -> Explanation | None:
        """What had come back in its place, and nothing says how it ended: a receive passed over
        it, which is no record."""
        back = [
            delivery_end
            for delivery_end in evidence.delivery_ends.values()
            if delivery_end.kind == ReviveKind.RETURNED
        ]
        last = evidence.last
        if (
            last is None
            or not evidence.complete
            or evidence.delivery_ends.get(last.key) not in back
        ):
            return None
        attempt = topics.first_attempt(copy.topic.name, copy.message.attempt) + len(back)
        return self._not_taken(copy, group, attempt, 0, _handed_proofs(evidence))

    def _not_taken(
        self,
        copy: StoredCopy,
        group: SubscriptionGroup,
        attempt: int,
        passed_ms: int,
        proofs: list[Proof],
    ) -> Explanation:
        """A receive looked at it and did not take it; before `passed_ms`, if that is known."""
        expired_ms = self._store.reader.expired_at_ms(copy.message)
        if expired_ms and (not passed_ms or passed_ms >= expired_ms):
            return over(group, State.EXPIRED, expired_ms, attempt, TTL_OVER, proofs)
        text = "the filter of the receives that came by did not accept it"
        text += self._last_filter(copy, group)
        return over(group, State.FILTERED, passed_ms, attempt, text, proofs)

    def _last_filter(self, copy: StoredCopy, group: SubscriptionGroup) -> str:
        """It was another one then if it accepts the message."""
        name = copy.topic.name
        topic = topics.split_group_topic(name)[1] if topics.is_group_owned(name) else name
        last = self._filters.last_of((group.name, topic))
        if last.matches_all:
            return ""
        if last.accepts(copy.message):
            return f"; it was another one than the last receive's, which accepts it: {last.text}"
        return f"; the last receive's was: {last.text}"

    def _buffered(
        self, copy: StoredCopy, group: SubscriptionGroup, ck: PopCheckPoint
    ) -> Explanation:
        """Its check point is in memory only: there is no record of it, and perhaps never will."""
        member = copy.message.header.queue_offset - ck.start_offset
        if ck.acked >> member & 1:
            text = "acked; its check point was in memory only"
            return over(group, State.ACKED, 0, copy.message.attempt, text, [])
        handed = DeliveryRecord(
            ck.key, member, False, 0, 0, ck.popped_at_ms, ck.revive_at_ms, ck.client
        )
        return self._invisible(copy, group, handed, [])

    def _invisible(
        self, copy: StoredCopy, group: SubscriptionGroup, last: DeliveryRecord, proofs: list[Proof]
    ) -> Explanation:
        attempt = self._attempt(copy, group)
        live = self._table.find(*last.key)
        then = f"comes back as attempt {attempt + 1}"
        if attempt >= group.max_attempts:
            then = f"becomes a dead letter: {group.max_attempts} attempts are all that it gets"
        if live is not None and live.flags & AUTO_RENEW:
            then = f"stays away while its client is heard of; then it {then}"
        return Explanation(
            group.name,
            State.INVISIBLE,
            last.wall_ms,
            attempt,
            f"delivered as attempt {attempt}" + (", and changed" if last.changed else ""),
            f"unless it is acked it {then}",
            last.revive_at_ms,
            last.client,
            proofs,
        )


def _unknown(copy: StoredCopy, group: SubscriptionGroup, evidence: Evidence) -> Explanation:
    text = "it was handed out, and neither an ack nor a later copy of it was found"
    if not evidence.complete:
        text = f"no answer within {evidence.scanned} records behind it"
    proofs = _handed_proofs(evidence)
    return over(group, State.UNKNOWN, 0, copy.message.attempt, text, proofs)


def _handed_proofs(evidence: Evidence) -> list[Proof]:
    """The last delivery's records: its check point, and the last change of it."""
    return list(_last_delivery(evidence))


def _last_delivery(evidence: Evidence) -> Iterator[Proof]:
    first = max((at for at, item in enumerate(evidence.deliveries) if not item.changed), default=0)
    delivered = evidence.deliveries[first : first + 1]
    changed = evidence.deliveries[first + 1 :][-1:]
    for delivery in (*delivered, *changed):
        what = "change" if delivery.changed else "check point"
        epoch, sequence = delivery.key
        yield Proof(what, delivery.position, delivery.wall_ms, f"epoch {epoch} sequence {sequence}")


def _is_unread(progress: QueueProgress, offset: int) -> bool:
    """Whether the group may still get the message from this place, and nobody has it.

    Messages of a FIFO group end in any order, and come back in place.
    """
    if isinstance(progress, FifoProgress):
        return progress.is_waiting(offset)
    return offset >= progress.cursor


def _line(message: StoredMessage) -> tuple[int, bytes]:
    """Names the message group that a parked message is of: its first queue, and its key."""
    token = message.token
    assert token is not None, "a parked message without its token"
    return token.queue_id, message_group(message.properties)


def _open_at(progress: QueueProgress, offset: int) -> PopCheckPoint | None:
    """The check point in the queue's line that holds the offset, if it is still in memory."""
    for ck in progress.open:
        at = offset - ck.start_offset
        if at >= 0 and ck.members >> at & 1:
            return ck
    return None
