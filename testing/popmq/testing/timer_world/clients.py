"""Clients of the timer's world: they send delayed messages, recall and reschedule them."""

from collections.abc import Callable

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutRequest, RecallResult
from popmq.common.record.message import tag_hash
from popmq.common.topics import MessageType
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.oracle.client_history import ResourceIncarnation
from popmq.testing.sim.clients import SimClients
from popmq.testing.timer_world.oracle import DelayedMessage, RecallHistory, TimerOracle
from popmq.testing.timer_world.sometimes_states import TimerSometimes as States

_REFUSALS = (Code.TOO_MANY_REQUESTS, Code.ILLEGAL_DELIVERY_TIME)


class TimerClients(SimClients):
    _oracle: TimerOracle

    def send_delayed(
        self,
        topic: ResourceIncarnation,
        dues: list[tuple[int, int]],
        again: DelayedMessage | None = None,
    ) -> None:
        """One request; each message with its due time (negative: a delay) and its spread.

        `again`: with the id of that message, as when a client thinks that it was lost.
        """
        oracle = self._oracle
        batch = [self._story(topic, due_ms, spread_ms, again) for due_ms, spread_ms in dues]
        entries = [
            PutEntry(
                MessageType.DELAY,
                message.head,
                message.properties,
                message.tag_hash,
                -1,
                message.due_ms,
                message.name,
                message.spread_ms,
            )
            for message in batch
        ]

        def hear(answer: bytes | PopmqError) -> None:
            if isinstance(answer, PopmqError):
                for message in batch:
                    message.refused = True
                self._check_refusal(topic, answer.code)
                return
            for message, result in zip(batch, hop.decode_put_reply(answer), strict=True):
                if result.code != Code.OK:
                    message.refused = True
                    self._check_refusal(topic, Code(result.code))
                    continue
                message.events.append(f"OK, due {result.due_ms}")
                oracle.sent(message, result.due_ms)
                self._tally.hit(States.STORED if result.due_ms else States.AT_ONCE)
                self._tally.hit(States.SPREAD, int(result.due_ms > message.first_due_ms))
            self._note(f"sent {[item.number for item in batch if item.ok_at]}")

        names = ",".join(f"{message.number}@{message.due_ms}" for message in batch)
        body = hop.encode_put(PutRequest(topic.name, entries))
        self._ask(f"put {topic.name} {names}", Kind.PUT, body, hear)
        for message in batch:
            message.decided_wall_ms = self._machine.clock.wall_ms()

    def send_noise(self, topic: ResourceIncarnation, size: int) -> None:
        entry = PutEntry(MessageType.NORMAL, b"noise" + bytes(size), b"", 0, -1)
        body = hop.encode_put(PutRequest(topic.name, [entry]))
        self._ask(f"noise {size}", Kind.PUT, body, lambda answer: None)

    def recall(self, story: DelayedMessage) -> None:
        ask = self._oracle.ask(story)
        story.twins[0].recalls += 1  # of the id

        def hear(outcome: RecallResult) -> None:
            late = outcome is RecallResult.ALREADY_VISIBLE
            self._tally.hit(States.RECALLED, int(outcome is RecallResult.DONE))
            self._tally.hit(States.RECALLED_AGAIN, int(ask.cancelled))
            self._tally.hit(States.RECALLED_LATE, int(late))
            self._tally.hit(States.RECALL_RACED, int(late and not ask.fired))
            self._tally.hit(States.NOT_FOUND, int(outcome is RecallResult.NOT_FOUND))
            self._said(ask, outcome)
            self._oracle.recalled(ask, outcome)

        request = pb.RecallRequest(topic=story.topic.name, message_id=story.name)

        def heard(reply: bytes) -> None:
            hear(RecallResult(pb.RecallReply.FromString(reply).outcome))

        self._decide(ask, "recall", Kind.RECALL, request.SerializeToString(), heard)

    def reschedule(self, story: DelayedMessage, due_ms: int) -> None:
        ask = self._oracle.ask(story, due_ms)

        def hear(outcome: RecallResult, new_due_ms: int) -> None:
            late = outcome is RecallResult.ALREADY_VISIBLE
            self._tally.hit(States.RESCHEDULED, int(outcome is RecallResult.DONE))
            self._tally.hit(States.RESCHEDULED_LATE, int(late))
            self._said(ask, outcome, new_due_ms)
            self._oracle.rescheduled(ask, outcome, new_due_ms)

        request = pb.RescheduleRequest(
            topic=story.topic.name, message_id=story.name, new_due_ms=due_ms
        )

        def heard(reply: bytes) -> None:
            decoded_reply = pb.RescheduleReply.FromString(reply)
            hear(RecallResult(decoded_reply.outcome), decoded_reply.due_ms)

        what = f"reschedule {due_ms}"
        self._decide(ask, what, Kind.RESCHEDULE, request.SerializeToString(), heard)

    # -- inside

    def _story(
        self,
        topic: ResourceIncarnation,
        due_ms: int,
        spread_ms: int,
        again: DelayedMessage | None = None,
    ) -> DelayedMessage:
        number = len(self._oracle.delayed)
        size = self._rng.choice((10, 40, 200, 900))
        head = b"%06d|" % number + self._rng.randbytes(size)
        name = again.name.encode() if again is not None else b"m%06d" % number
        story = DelayedMessage(
            number,
            topic,
            head,
            bytes((3 << 3 | 2, len(name))) + name + self.ids.fingerprint(number),
            tag_hash(self._rng.choice(("", "A"))),
            due_ms,
            spread_ms,
            self._machine.clock.wall_ms(),
            twins=again.twins if again is not None else [],
        )
        story.twins.append(story)
        self._oracle.delayed[number] = story
        return story

    def _said(self, ask: RecallHistory, outcome: RecallResult, due_ms: int = 0) -> None:
        self._note(f"message {ask.history.number}: {outcome.name} {due_ms}")
        ask.history.events.append(f"-> {outcome.name} {due_ms}")

    def _check_refusal(self, topic: ResourceIncarnation, code: Code) -> None:
        self._tally.hit(States.REFUSED, int(code == Code.TOO_MANY_REQUESTS))
        self._tally.hit(States.TOO_FAR, int(code == Code.ILLEGAL_DELIVERY_TIME))
        gone = code == Code.TOPIC_NOT_FOUND and topic.gone > 0
        if not gone and code not in _REFUSALS:
            self._oracle.report_violation("I0 answers", f"a send was refused: {code.name}")

    def _decide(
        self,
        ask: RecallHistory,
        what: str,
        kind: Kind,
        body: bytes,
        connected: Callable[[bytes], None],
    ) -> None:
        """Decided now, since no read of this disk waits; told when it is confirmed."""
        story, number = ask.history, self._number + 1
        story.events.append(f"{number} {what}")

        def hear(answer: bytes | PopmqError) -> None:
            if isinstance(answer, PopmqError):
                # An id alone does not say which of several messages is meant.
                unclear = self.ids.on and len(story.twins) > 1
                if not unclear or answer.code is not Code.BAD_REQUEST:
                    self._check_refusal(story.topic, answer.code)
                return
            connected(answer)

        self._ask(f"{what} {story.number}", kind, body, hear)
        ask.decided_wall_ms = self._machine.clock.wall_ms()
