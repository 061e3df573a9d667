"""Explain, for messages with a delivery time: what became of the timer before any group saw it."""

from collections.abc import Iterable
from functools import partial

from popmq.broker.core.broker import Broker
from popmq.broker.diagnostics.explanation import State
from popmq.broker.operations.resumable_reads import ResumableRead, read
from popmq.broker.timer.timer_recall import StoredTimer
from popmq.broker.timer.timer_state import KEEP_CANCELLED_MS
from popmq.common import topics
from popmq.common.record.message import StoredMessage
from popmq.common.record.timer_token import FiringToken, TimerEnd, TimerToken
from popmq.common.topics import SubscriptionGroup, TopicConfig
from popmq.common.wire import admin_pb2 as pb


class TimerExplainer:
    """The timers of one message id; each is told of once, as it is now."""

    def __init__(self, broker: Broker, message_id: str, found: list[StoredTimer]) -> None:
        self._broker = broker
        self._message_id = message_id
        self._found = found
        tokens = [one.message.any_token for one in found]
        self._replaced = {
            token.replaces[1]
            for token in tokens
            if isinstance(token, TimerToken) and token.replaces is not None
        }
        self._fired: set[int] = set()  # their life goes on in their topic

    @classmethod
    def find(
        cls, broker: Broker, message_id: str, topic: TopicConfig | None
    ) -> "ResumableRead[TimerExplainer]":
        topic_id = topic.id if topic is not None else None
        found = yield from read(partial(broker.timers.recall.find, topic_id, message_id))
        return cls(broker, message_id, found.stored)

    def proofs(self, copy: StoredMessage) -> list[pb.Proof]:
        """Of a message that a timer delivered: the timer's record. It is over then."""
        token = copy.any_token
        if not isinstance(token, FiringToken):
            return []
        self._fired.add(token.identity)
        return [_proof(one) for one in self._found if one.timer.identity == token.identity]

    def told(self, group: SubscriptionGroup | None) -> ResumableRead[list[pb.ExplainedMessage]]:
        """Those that are in no topic; call it when `proofs` has seen every copy."""
        told = []
        for stored in self._found:
            if stored.timer.identity in self._fired or stored.timer.identity in self._replaced:
                continue
            explained = yield from self._explain(stored)
            explained.group = group.name if group is not None else ""
            told.append(self._message(stored, explained))
        return told

    def _explain(self, stored: StoredTimer) -> ResumableRead[pb.Explained]:
        timer, state = stored.timer, self._broker.timers.state
        topic = self._broker.registry.topic_by_id(timer.topic_id)
        told = pb.Explained(attempt=1, proofs=[_proof(stored), *self._replaced_by(stored)])
        if self._broker.timers.recall.is_pending(stored):
            told.state = State.DELAYED.value
            told.since_ms = stored.message.header.wall_ms
            told.until_ms = timer.due_ms
            told.text = "its delivery time has not come"
            told.next = "then it is delivered as attempt 1; `popmq timers cancel` prevents that"
            if topic is None:
                told.next = f"its topic was deleted: then it goes to {topics.TIMER_DLQ_TOPIC}"
            return told
        nothing = "nothing: for every group it is over"
        if state.is_migrated(timer.identity):
            told.state, told.next = State.MOVED.value, "what that group tells of it"
            told.text = "another broker group has it, because this one is or was drained"
            return told
        if state.is_cancelled(timer.identity):
            told.state, told.next = State.RECALLED.value, nothing
            told.text = "it was recalled before its delivery time"
            return told
        letter = yield from self._dead_letter(timer.identity)
        if letter is not None:
            told.state = State.DEAD_LETTERED.value
            told.since_ms = letter.header.wall_ms
            told.text = "its topic was deleted before its delivery time"
            told.next = f"stays in {topics.TIMER_DLQ_TOPIC} until it expires"
            told.proofs.append(_record("firing", letter, topics.TIMER_DLQ_TOPIC))
            return told
        told.state, told.next = State.UNKNOWN.value, nothing
        told.text = (
            "its delivery time is over, and it is not in its topic: it could not be read, or "
            "its copy there went by retention"
        )
        if timer.due_ms < state.cursor[0] - KEEP_CANCELLED_MS:
            told.text += ", or it was recalled (which is known for 10 minutes behind that time)"
        return told

    def _dead_letter(self, identity: int) -> ResumableRead[StoredMessage | None]:
        topic = self._broker.registry.find_topic(topics.TIMER_DLQ_TOPIC)
        if topic is None:
            return None
        look = partial(self._broker.lookup.by_id, topic.id, self._message_id, wait=False)
        findings = yield from read(look)
        for message in findings.messages:
            token = message.any_token
            if (
                isinstance(token, FiringToken)
                and token.identity == identity
                and token.outcome is TimerEnd.DEAD_LETTERED
            ):
                return message
        return None

    def _replaced_by(self, stored: StoredTimer) -> Iterable[pb.Proof]:
        """The timer for which this one stands, if it is a rescheduled one."""
        token = stored.message.any_token
        if not isinstance(token, TimerToken) or token.replaces is None:
            return []
        return [_proof(one) for one in self._found if one.timer.identity == token.replaces[1]]

    def _message(self, stored: StoredTimer, told: pb.Explained) -> pb.ExplainedMessage:
        header, token = stored.message.header, stored.message.any_token
        topic = self._broker.registry.topic_by_id(stored.timer.topic_id)
        return pb.ExplainedMessage(
            broker=self._broker.settings.broker.name,
            topic=topic.name if topic is not None else f"#{stored.timer.topic_id}",
            queue_id=token.queue_id if isinstance(token, TimerToken) else 0,
            queue_offset=-1,  # none before it is delivered
            stored_ms=header.wall_ms,
            position=header.position,
            groups=[told],
        )


def _proof(stored: StoredTimer) -> pb.Proof:
    proof = _record("timer", stored.message, topics.TIMER_TOPIC)
    proof.text += f", due at {stored.timer.due_ms}"
    return proof


def _record(what: str, message: StoredMessage, topic: str) -> pb.Proof:
    header = message.header
    text = f"{topic} queue {header.queue_id} offset {header.queue_offset}"
    return pb.Proof(what=what, position=header.position, wall_ms=header.wall_ms, text=text)
