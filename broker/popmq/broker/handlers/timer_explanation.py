"""TimerExplainer: the part of EXPLAIN for delayed messages that are in no topic."""

from collections.abc import Iterable
from functools import partial

from popmq.broker.core.broker import Broker
from popmq.broker.diagnostics.explanation import State
from popmq.broker.operations.resumable_reads import ResumableRead, read
from popmq.broker.timer.timer_recall import StoredTimer
from popmq.broker.timer.timer_state import KEEP_CANCELLED_MS
from popmq.common import topics
from popmq.common.quantities import iso_time
from popmq.common.record.message import StoredMessage
from popmq.common.record.timer_token import FiringToken, TimerEnd, TimerToken
from popmq.common.topics import SubscriptionGroup, TopicConfig
from popmq.common.wire import admin_pb2 as pb


class TimerExplainer:
    """Explains the timers of one message id, each once, by its state now."""

    def __init__(self, broker: Broker, message_id: str, timers: list[StoredTimer]) -> None:
        self._broker = broker
        self._message_id = message_id
        self._timers = timers
        tokens = [timer.message.any_token for timer in timers]
        self._replaced = {
            token.replaces[1]
            for token in tokens
            if isinstance(token, TimerToken) and token.replaces is not None
        }
        self._fired: set[int] = set()  # identities; their messages are in a topic

    @classmethod
    def find(
        cls, broker: Broker, message_id: str, topic: TopicConfig | None
    ) -> "ResumableRead[TimerExplainer]":
        topic_id = topic.id if topic is not None else None
        matches = yield from read(partial(broker.timers.recall.find, topic_id, message_id))
        return cls(broker, message_id, matches.stored)

    def proofs(self, copy: StoredMessage) -> list[pb.Proof]:
        """The record of the timer that delivered `copy`; `undelivered` then omits that timer."""
        token = copy.any_token
        if not isinstance(token, FiringToken):
            return []
        self._fired.add(token.identity)
        return [_proof(timer) for timer in self._timers if timer.timer.identity == token.identity]

    def undelivered(
        self, group: SubscriptionGroup | None
    ) -> ResumableRead[list[pb.ExplainedMessage]]:
        """Explains the timers that delivered no message.

        Call it after `proofs` was called with every copy of the message.
        """
        messages = []
        for stored in self._timers:
            if stored.timer.identity in self._fired or stored.timer.identity in self._replaced:
                continue
            explained = yield from self._explain(stored)
            explained.group = group.name if group is not None else ""
            messages.append(self._message(stored, explained))
        return messages

    def _explain(self, stored: StoredTimer) -> ResumableRead[pb.Explained]:
        timer, state = stored.timer, self._broker.timers.state
        topic = self._broker.registry.topic_by_id(timer.topic_id)
        explanation = pb.Explained(attempt=1, proofs=[_proof(stored), *self._replaced_by(stored)])
        if self._broker.timers.recall.is_pending(stored):
            explanation.state = State.DELAYED.value
            explanation.since_ms = stored.message.header.wall_ms
            explanation.until_ms = timer.due_ms
            explanation.text = "its delivery time has not come"
            explanation.next = (
                "at that time it is delivered as attempt 1; `popmq timers cancel` prevents that"
            )
            if topic is None:
                explanation.next = (
                    f"its topic was deleted: at that time it goes to {topics.TIMER_DLQ_TOPIC}"
                )
            return explanation
        no_step = "nothing: no group will receive it"
        if state.is_migrated(timer.identity):
            explanation.state = State.MOVED.value
            explanation.next = "see the explanation by that broker group"
            explanation.text = (
                "it goes or went to another broker group, because this one is or was drained"
            )
            return explanation
        if state.is_cancelled(timer.identity):
            explanation.state, explanation.next = State.RECALLED.value, no_step
            explanation.text = "it was recalled before its delivery time"
            return explanation
        dead_letter = yield from self._dead_letter(timer.identity)
        if dead_letter is not None:
            explanation.state = State.DEAD_LETTERED.value
            explanation.since_ms = dead_letter.header.wall_ms
            explanation.text = "its topic was deleted before its delivery time"
            explanation.next = f"stays in {topics.TIMER_DLQ_TOPIC} until it expires"
            explanation.proofs.append(_record("firing", dead_letter, topics.TIMER_DLQ_TOPIC))
            return explanation
        explanation.state, explanation.next = State.UNKNOWN.value, no_step
        explanation.text = (
            "its delivery time has passed, and it is not in its topic: it could not be read, or "
            "retention deleted its copy there"
        )
        if timer.due_ms < state.cursor[0] - KEEP_CANCELLED_MS:
            explanation.text += (
                ", or it was recalled (recalls are kept for 10 minutes after the delivery time)"
            )
        return explanation

    def _dead_letter(self, identity: int) -> ResumableRead[StoredMessage | None]:
        topic = self._broker.registry.find_topic(topics.TIMER_DLQ_TOPIC)
        if topic is None:
            return None
        find_by_id = partial(self._broker.lookup.by_id, topic.id, self._message_id, wait=False)
        findings = yield from read(find_by_id)
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
        """The record of the earlier timer, if `stored` is a rescheduled timer."""
        token = stored.message.any_token
        if not isinstance(token, TimerToken) or token.replaces is None:
            return []
        return [
            _proof(timer) for timer in self._timers if timer.timer.identity == token.replaces[1]
        ]

    def _message(self, stored: StoredTimer, explanation: pb.Explained) -> pb.ExplainedMessage:
        header, token = stored.message.header, stored.message.any_token
        return pb.ExplainedMessage(
            broker=self._broker.settings.broker.name,
            topic=self._broker.registry.topic_label(stored.timer.topic_id),
            queue_id=token.queue_id if isinstance(token, TimerToken) else 0,
            queue_offset=-1,  # none before it is delivered
            stored_ms=header.wall_ms,
            position=header.position,
            groups=[explanation],
        )


def _proof(stored: StoredTimer) -> pb.Proof:
    proof = _record("timer", stored.message, topics.TIMER_TOPIC)
    proof.text += f", due at {iso_time(stored.timer.due_ms)}"
    return proof


def _record(what: str, message: StoredMessage, topic: str) -> pb.Proof:
    header = message.header
    text = f"{topic} queue {header.queue_id} offset {header.queue_offset}"
    return pb.Proof(what=what, position=header.position, wall_ms=header.wall_ms, text=text)
