"""Explain: one named state for each group, since when, what is next, and what proves it."""

from dataclasses import replace

import pytest

from popmq.broker.deliveries.ended_check_points import OUTCOME_MS
from popmq.broker.deliveries.pop_check_point import RECORD_SIZE
from popmq.broker.diagnostics import delivery_evidence as evidence
from popmq.broker.diagnostics.explanation import State, StoredCopy, WithheldReason
from popmq.broker.log.segment_file import SegmentFile
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.message import HEADER_SIZE, check_record, tag_hash
from popmq.common.step_loop import Done, Flusher, Work
from popmq.common.topics import (
    REVIVE_TOPIC_ID,
    CheckPoints,
    MessageType,
    StartAt,
    SubscriptionGroup,
)
from popmq.common.wire import admin_pb2 as pb
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.harness.core_broker import CoreBroker, pop


@pytest.fixture
def core() -> CoreBroker:
    broker = CoreBroker()
    broker.topic("orders", queues=2)
    broker.group("g", max_attempts=3)
    return broker


def send(core: CoreBroker, message_id: str, tag: str = "", queue_id: int = 0) -> None:
    properties = api.SystemProperties(message_id=message_id, tag=tag).SerializeToString()
    entry = hop.PutEntry(
        MessageType.NORMAL, message_id.encode(), properties, tag_hash(tag), queue_id
    )
    core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])))


def ask(core: CoreBroker, message_id: str, group: str = "", topic: str = "") -> pb.ExplainReply:
    request = pb.ExplainRequest(message_id=message_id, group=group, topic=topic)
    return pb.ExplainReply.FromString(core.reply(Kind.EXPLAIN, request.SerializeToString()))


def told(core: CoreBroker, message_id: str, group: str = "g") -> pb.Explained:
    (message,) = ask(core, message_id, group).messages
    (explained,) = message.groups
    for proof in explained.proofs:  # each is an intact record of the log
        log = core.broker.store.reader._log
        size = int.from_bytes(log.read_up_to(proof.position, 4), "big")
        header = check_record(log.read_up_to(proof.position, size), 0, proof.position)
        assert header.wall_ms == proof.wall_ms
        assert header.size >= HEADER_SIZE
    return explained


def whats(explained: pb.Explained) -> list[str]:
    return [proof.what for proof in explained.proofs]


def test_a_message_that_nobody_has_is_ready(core: CoreBroker) -> None:
    stored_ms = core.clock.wall_ms()
    send(core, "A")
    ready = told(core, "A")
    assert (ready.state, ready.attempt, ready.since_ms) == ("READY", 1, stored_ms)
    assert "attempt 1" in ready.next
    assert whats(ready) == ["message"]


def test_a_delivered_message_is_invisible_until_a_time_by_a_client(core: CoreBroker) -> None:
    send(core, "A")
    core.advance(500)
    popped_ms = core.clock.wall_ms()
    core.receive("orders", "g", invisible_ms=30_000)
    core.advance(1_000)
    held = told(core, "A")
    assert held.state == "INVISIBLE"
    assert (held.since_ms, held.until_ms) == (popped_ms, popped_ms + 30_000)
    assert (held.client, held.attempt) == ("a-client", 1)
    assert "comes back as attempt 2" in held.next
    assert whats(held) == ["message", "check point"]


def test_a_change_moves_the_time_and_is_a_proof(core: CoreBroker) -> None:
    send(core, "A")
    (delivery,) = core.receive("orders", "g", invisible_ms=30_000)
    handle = core.change("orders", "g", delivery.handle, 60_000)
    core.advance(1_000)
    core.change("orders", "g", handle, 90_000)
    held = told(core, "A")
    assert (held.state, held.until_ms) == ("INVISIBLE", core.clock.wall_ms() + 90_000)
    assert whats(held) == ["message", "check point", "change"]


def test_an_acked_message_is_acked_also_when_memory_has_forgotten_it(core: CoreBroker) -> None:
    for number in range(20):
        send(core, f"M{number}", queue_id=number % 2)
    deliveries = core.receive("orders", "g")
    core.advance(100)
    acked_ms = core.clock.wall_ms()
    core.ack("orders", "g", *(delivery.handle for delivery in deliveries))
    for _ in range(2):
        acked = told(core, "M7")
        assert (acked.state, acked.since_ms) == ("ACKED", acked_ms)
        assert whats(acked) == ["message", "check point", "ack"]
        core.advance(OUTCOME_MS + 60_000)
        core.run_steps()
    assert core.broker.table.outcomes.order() == []


def test_a_retried_message_is_followed_through_its_copies(core: CoreBroker) -> None:
    send(core, "A")
    core.receive("orders", "g", invisible_ms=1_000)
    core.advance(2_000)
    ready = told(core, "A")
    assert (ready.state, ready.attempt) == ("READY", 2)
    assert whats(ready) == ["message", "retry"]
    core.receive("orders", "g", invisible_ms=1_000)
    assert (told(core, "A").state, told(core, "A").attempt) == ("INVISIBLE", 2)
    core.advance(2_000)
    (last,) = core.receive("orders", "g", invisible_ms=1_000)
    held = told(core, "A")
    assert (held.state, held.attempt) == ("INVISIBLE", 3)
    assert "becomes a dead letter" in held.next
    core.ack("orders", "g", last.handle)
    acked = told(core, "A")
    assert (acked.state, acked.attempt) == ("ACKED", 3)
    assert whats(acked) == ["message", "retry", "check point", "ack"]


def test_a_dead_letter_says_why_and_its_redriven_copy_goes_on(core: CoreBroker) -> None:
    send(core, "A")
    (delivery,) = core.receive("orders", "g")
    core.reject("orders", "g", delivery.handle)
    dead = told(core, "A")
    assert (dead.state, dead.attempt) == ("DEAD_LETTERED", 1)
    assert "rejected" in dead.text
    assert "popmq dlq redrive g" in dead.next
    assert whats(dead) == ["message", "dead letter"]
    core.reply(Kind.REDRIVE, pb.RedriveRequest(group="g").SerializeToString())
    ready = told(core, "A")
    assert (ready.state, ready.attempt) == ("READY", 1)
    assert whats(ready) == ["message", "redriven"]
    core.ack("orders", "g", core.receive("orders", "g")[0].handle)
    assert told(core, "A").state == "ACKED"


def test_a_message_that_a_filter_passed_over_is_filtered(core: CoreBroker) -> None:
    send(core, "A", tag="red")
    send(core, "B", tag="blue")
    core.reply(Kind.POP, pop("orders", "g", expression="blue"))
    assert told(core, "A").state == "FILTERED"
    assert told(core, "A").text.endswith("; the last receive's was: blue")
    assert told(core, "B").state == "INVISIBLE"


def test_a_filter_of_today_that_accepts_the_message_is_not_named_as_the_one_of_then(
    core: CoreBroker,
) -> None:
    send(core, "A", tag="red")
    send(core, "B", tag="blue")
    core.reply(Kind.POP, pop("orders", "g", expression="blue"))
    core.reply(Kind.POP, pop("orders", "g", expression="blue || red"))
    assert told(core, "A").state == "FILTERED"
    assert told(core, "A").text.endswith(
        "; it was another one than the last receive's, which accepts it: blue || red"
    )


def test_an_unread_message_that_is_too_old_is_expired(core: CoreBroker) -> None:
    topic = core.broker.registry.topic("orders")
    core.broker.registry.alter_topic(replace(topic, retention_ms=60_000))
    send(core, "A")
    send(core, "C", queue_id=1)
    core.reply(Kind.POP, pop("orders", "g", queue_id=1))
    for _ in range(4):
        core.advance(60_000)
    assert told(core, "A").state == "EXPIRED"
    send(core, "B")
    core.receive("orders", "g")
    assert told(core, "A").state == "EXPIRED"
    assert told(core, "B").state == "INVISIBLE"
    assert told(core, "C").state == "INVISIBLE"  # its retry: retries do not expire so soon


def test_what_was_filtered_before_it_was_too_old_stays_filtered(core: CoreBroker) -> None:
    topic = core.broker.registry.topic("orders")
    core.broker.registry.alter_topic(replace(topic, retention_ms=60_000))
    send(core, "A", tag="red")
    send(core, "B", tag="blue")
    core.reply(Kind.POP, pop("orders", "g", expression="blue"))
    for _ in range(4):
        core.advance(60_000)
    assert told(core, "A").state == "FILTERED"


def reset(core: CoreBroker, **to: object) -> None:
    request = pb.ResetOffsetRequest(group="g", topic="orders", **to)  # type: ignore[arg-type]
    core.reply(Kind.RESET_OFFSET, request.SerializeToString())


def test_a_reset_skips_forward_and_makes_ready_again_backward(core: CoreBroker) -> None:
    for name in ("A", "B", "C"):
        send(core, name)
    a, _ = core.receive("orders", "g", limit=2)
    core.ack("orders", "g", a.handle)
    reset(core, newest=True)
    assert told(core, "A").state == "ACKED"
    for name in ("B", "C"):  # delivered at the reset, and never delivered
        skipped = told(core, name)
        assert skipped.state == "SKIPPED"
        assert whats(skipped)[-1] == "reset"
    reset(core, oldest=True)
    assert [told(core, name).state for name in "ABC"] == ["READY"] * 3
    core.receive("orders", "g", limit=1)
    assert told(core, "A").state == "INVISIBLE"


def test_a_group_that_began_later_skipped_it(core: CoreBroker) -> None:
    core.group("late", start_at=StartAt.NEWEST)
    send(core, "A")
    assert told(core, "A", "late").state == "SKIPPED"
    core.receive("orders", "late")
    assert told(core, "A", "late").state == "SKIPPED"
    assert "began behind it" in told(core, "A", "late").text
    send(core, "B")
    assert told(core, "B", "late").state == "READY"


def test_every_group_that_reads_the_topic_is_told_of(core: CoreBroker) -> None:
    core.group("h")
    core.group("never")
    send(core, "A")
    core.receive("orders", "g")
    core.ack("orders", "h", core.receive("orders", "h")[0].handle)
    (message,) = ask(core, "A").messages
    assert [(group.group, group.state) for group in message.groups] == [
        ("g", "INVISIBLE"),
        ("h", "ACKED"),
    ]
    assert (message.topic, message.queue_id, message.queue_offset) == ("orders", 0, 0)


def test_a_message_sent_twice_under_one_id_is_two_messages(core: CoreBroker) -> None:
    send(core, "A", queue_id=0)
    send(core, "A", queue_id=1)
    core.reply(Kind.POP, pop("orders", "g", queue_id=1))
    states = {message.queue_id: message.groups[0].state for message in ask(core, "A", "g").messages}
    assert states == {0: "READY", 1: "INVISIBLE"}


def test_what_is_not_there_is_an_empty_answer_and_bad_names_are_refused(core: CoreBroker) -> None:
    assert list(ask(core, "nothing").messages) == []
    for fields, code in (
        (("", "", ""), Code.ILLEGAL_MESSAGE_ID),
        (("x" * 2_000, "", ""), Code.ILLEGAL_MESSAGE_ID),
        (("A", "nobody", ""), Code.CONSUMER_GROUP_NOT_FOUND),
        (("A", "", "nowhere"), Code.TOPIC_NOT_FOUND),
        (("A", "", "%RETRY%g+orders"), Code.ILLEGAL_TOPIC),
    ):
        with pytest.raises(PopmqError) as caught:
            ask(core, *fields)
        assert caught.value.code == code


def test_a_part_that_holds_a_message_back_names_its_state(core: CoreBroker) -> None:
    send(core, "A")

    def hold(copy: StoredCopy, group: SubscriptionGroup) -> WithheldReason | None:
        if group.name != "g":
            return None
        return WithheldReason(
            State.BLOCKED, 5, "key k has an older message in flight", "when that ends"
        )

    core.broker.diagnostics.explainer.holds.append(hold)
    blocked = told(core, "A")
    assert (blocked.state, blocked.since_ms) == ("BLOCKED", 5)
    assert "key k" in blocked.text


def test_the_states_are_the_same_after_a_restart(core: CoreBroker) -> None:
    names = ("acked", "held", "dead", "ready")
    for name in names:
        send(core, name)
    acked, _, dead = core.receive("orders", "g", limit=3, invisible_ms=600_000)
    core.ack("orders", "g", acked.handle)
    core.reject("orders", "g", dead.handle)
    before = {name: told(core, name) for name in names}
    states = ["ACKED", "INVISIBLE", "DEAD_LETTERED", "READY"]
    assert [before[name].state for name in names] == states
    for _ in range(2):
        core.stop()
        core.start()
        for name in names:
            after = told(core, name)
            assert (after.state, after.since_ms) == (before[name].state, before[name].since_ms)
            assert whats(after) == whats(before[name])
    # Who has it is told by a number now: names are soft.
    assert told(core, "held").client.startswith("#")


def test_a_scan_stops_at_its_bound_and_says_so(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(core, "A")
    (delivery,) = core.receive("orders", "g", limit=1)
    core.ack("orders", "g", delivery.handle)
    core.advance(OUTCOME_MS + 60_000)
    monkeypatch.setattr(evidence, "RECORDS_LIMIT", 0)
    unknown = told(core, "A")
    assert unknown.state == "UNKNOWN"
    assert "within 0 records" in unknown.text


class SlowFlusher:
    """Keeps the work until it is let go."""

    def __init__(self, real: Flusher) -> None:
        self._real = real
        self._kept: list[tuple[Work, Done]] = []

    def submit(self, work: Work, done: Done) -> None:
        self._kept.append((work, done))

    def let_go(self) -> None:
        for work, done in self._kept:
            self._real.submit(work, done)


def test_an_answer_waits_for_what_memory_knows_to_be_confirmed(core: CoreBroker) -> None:
    send(core, "A")
    store = core.broker.store
    real = store._commit._flusher
    store._commit._flusher = slow = SlowFlusher(real)
    core.ask(Kind.POP, pop("orders", "g"))  # its check point is in memory, not in the queue
    request = pb.ExplainRequest(message_id="A", group="g")
    answer = core.ask(Kind.EXPLAIN, request.SerializeToString())
    assert not answer.heard
    store._commit._flusher = real
    slow.let_go()
    core.run_until_idle()
    assert answer.body is not None
    (message,) = pb.ExplainReply.FromString(answer.body).messages
    assert message.groups[0].state == "INVISIBLE"


def test_what_happened_before_a_reset_to_an_older_place_does_not_count(core: CoreBroker) -> None:
    send(core, "A", tag="red")
    send(core, "B", tag="blue")
    for delivery in core.receive("orders", "g"):
        core.ack("orders", "g", delivery.handle)
    reset(core, oldest=True)
    core.reply(Kind.POP, pop("orders", "g", expression="blue"))
    assert told(core, "A").state == "FILTERED"
    assert told(core, "B").state == "INVISIBLE"


def test_a_long_log_is_searched_in_steps(core: CoreBroker) -> None:
    """Other work of the loop goes on between the pieces of a scan."""
    send(core, "A")
    core.reply(Kind.POP, pop("orders", "g", expression="none"))  # passes over it
    for number in range(1_500):
        send(core, f"M{number}")
    while batch := core.receive("orders", "g"):
        core.ack("orders", "g", *(delivery.handle for delivery in batch))
    request = pb.ExplainRequest(message_id="A", group="g")
    answer = core.ask(Kind.EXPLAIN, request.SerializeToString(), settle=False)
    steps = 0
    while not answer.heard:
        core.tick()
        steps += 1
    assert steps > 16
    assert answer.body is not None
    (message,) = pb.ExplainReply.FromString(answer.body).messages
    assert message.groups[0].state == "FILTERED"


def test_a_damaged_record_of_the_revive_topic_proves_nothing(core: CoreBroker) -> None:
    send(core, "A")
    (delivery,) = core.receive("orders", "g")
    core.ack("orders", "g", delivery.handle)
    core.advance(OUTCOME_MS + 60_000)
    core.run_steps()
    assert told(core, "A").state == "ACKED"
    queue = core.broker.store.queue(REVIVE_TOPIC_ID, 1)
    core.broker.store.dispatch.flush()
    file = queue.files()[0]
    assert isinstance(file, SegmentFile)
    data = bytearray(file.read(RECORD_SIZE, RECORD_SIZE))
    data[-1] ^= 1
    file.write(RECORD_SIZE, [bytes(data)])  # the ack
    unknown = told(core, "A")
    assert unknown.state == "UNKNOWN"
    assert whats(unknown) == ["message", "check point"]


def test_a_group_with_buffered_check_points_is_told_of_what_is_in_memory_only() -> None:
    core = CoreBroker()
    core.topic("orders", queues=1)
    core.group("g", check_points=CheckPoints.BUFFERED)
    for name in ("A", "B", "C"):
        send(core, name)
    popped_ms = core.clock.wall_ms()
    a, b, _ = core.receive("orders", "g", invisible_ms=60_000)
    held = told(core, "A")
    assert (held.state, held.until_ms) == ("INVISIBLE", popped_ms + 60_000)
    assert whats(held) == ["message"]
    core.ack("orders", "g", a.handle)
    assert told(core, "A").state == "ACKED"
    core.ack("orders", "g", b.handle)
    core.stop()
    core.start()
    done = told(core, "A")
    assert (done.state, whats(done)[0]) == ("ACKED", "message")
    assert told(core, "C").state in ("INVISIBLE", "READY")
