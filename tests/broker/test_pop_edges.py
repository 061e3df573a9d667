"""Pop at its edges: long names, deletions in between, queues that grow, filters that miss."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from popmq.broker.deliveries.pop_check_point import ChangeRecord, EndRecord, ReviveKind
from popmq.broker.meta import registry
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.message import RecordKind, tag_hash
from popmq.common.settings.settings import PopSettings
from popmq.common.topics import REVIVE_TOPIC_ID, MessageType, StartAt
from popmq.testing.disk.lying_disk import LyingDisk, ResidentDisk
from popmq.testing.harness.clock import ManualClock
from popmq.testing.harness.core_broker import SMALL, CoreBroker, bodies, pop, tagged


def test_names_of_the_longest_kind_make_no_path_that_a_file_system_refuses(tmp_path: Path) -> None:
    settings = replace(SMALL, broker=replace(SMALL.broker, data=str(tmp_path)))
    core = CoreBroker(disk=ResidentDisk(), settings=settings)
    topic, group = "t" * 127, "g" * 120
    core.topic(topic)
    core.send(topic, b"one")
    core.receive(topic, group, invisible_ms=100)
    core.advance(500)
    assert [delivery.attempt for delivery in core.receive(topic, group)] == [2]
    core.stop()
    core.start()


def test_a_topic_can_be_deleted_while_its_files_are_being_synced(core: CoreBroker) -> None:
    for number in range(40):
        core.send("orders", b"%d" % number)
    core.clock.advance(11_000)
    core.broker.step()  # a checkpoint is handed to the flusher
    core.broker.registry.delete_topic("orders")
    core.run_until_idle()
    core.advance(20_000)
    assert core.topic("orders").name == "orders"


def test_a_message_whose_retry_would_not_fit_a_segment_is_refused_at_once() -> None:
    settings = replace(
        SMALL,
        store=replace(SMALL.store, segment_bytes=1 << 20),
        message=replace(SMALL.message, max_body_bytes=1 << 19),
    )
    core = CoreBroker(settings=settings)
    core.topic("orders")
    entry = hop.PutEntry(MessageType.NORMAL, bytes((1 << 20) - 80 - 39), b"")
    reply = core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])))
    (result,) = hop.decode_put_reply(reply)
    assert result.code == Code.PAYLOAD_TOO_LARGE
    assert "store.segment_bytes" in result.message


def test_queues_that_were_added_later_are_read_from_their_start(core: CoreBroker) -> None:
    core.group("new", start_at=StartAt.NEWEST)
    core.send("orders", b"old", queue_id=0)
    assert core.receive("orders", "new") == []
    topic = core.broker.registry.topic("orders")
    core.broker.registry.alter_topic(replace(topic, queues=8))
    core.run_until_idle()
    for queue in range(8):
        core.send("orders", b"%d" % queue, queue_id=queue)
    assert len(core.receive("orders", "new")) == 8


def test_a_waiting_receive_reads_queues_that_were_added_meanwhile(core: CoreBroker) -> None:
    waiting = core.ask(Kind.POP, pop("orders", "g", poll_ms=20_000))
    topic = core.broker.registry.topic("orders")
    core.broker.registry.alter_topic(replace(topic, queues=8))
    core.run_until_idle()
    core.send("orders", b"one", queue_id=7)
    assert waiting.body is not None
    assert len(hop.decode_pop_reply(waiting.body).deliveries) == 1


@pytest.mark.parametrize("poll_ms", [0, 20_000])
def test_one_match_behind_thousands_of_others_is_found_in_one_receive(
    core: CoreBroker, poll_ms: int
) -> None:
    entries = [
        hop.PutEntry(MessageType.NORMAL, b"other", tagged("B"), tag_hash("B"), 0)
        for _ in range(4_000)
    ]
    match = hop.PutEntry(MessageType.NORMAL, b"match", tagged("A"), tag_hash("A"), 0)
    core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [*entries, match])))
    answer = core.ask(Kind.POP, pop("orders", "g", poll_ms=poll_ms, expression="A"))
    core.run_steps()
    assert answer.body is not None
    assert bodies(list(hop.decode_pop_reply(answer.body).deliveries)) == [b"match"]


def test_a_reply_that_cannot_be_given_spoils_no_other(core: CoreBroker) -> None:
    def broken() -> None:
        raise ValueError("this reply cannot be encoded")

    entry = hop.PutEntry(MessageType.NORMAL, b"one", b"")
    core.ask(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])), settle=False)
    core.broker.buffer.when_acks_confirmed(broken)
    waiting = core.ask(Kind.POP, pop("orders", "g", poll_ms=1_000), settle=False)
    core.run_until_idle()
    assert waiting.body is not None
    assert len(hop.decode_pop_reply(waiting.body).deliveries) == 1


def test_acks_of_one_request_are_one_record_for_each_check_point(core: CoreBroker) -> None:
    core.topic("two", queues=2)
    for _ in range(40):
        core.send("two", b"x")
    handles = [delivery.handle for delivery in core.receive("two", "g", limit=32)]
    assert len(handles) == 32
    records = core.broker.store.metrics.records
    results = core.ack("two", "g", *handles[:31], handles[3])
    assert [result.code for result in results] == [Code.OK] * 32
    assert core.broker.store.metrics.records - records == 2
    assert (core.broker.pop.acks.acked, core.broker.pop.acks.repeated) == (31, 1)
    assert core.broker.table.in_flight == 1
    core.stop()
    core.start()
    assert core.broker.table.in_flight == 1
    core.ack("two", "g", handles[31])
    assert core.broker.table.in_flight == 0


class TickingClock(ManualClock):
    """A millisecond passes whenever somebody looks at the wall clock."""

    def wall_ms(self) -> int:
        self.advance(1)
        return super().wall_ms()


def test_a_reply_says_no_later_delivery_time_than_the_one_that_its_invisible_time_counts_from() -> (
    None
):
    core = CoreBroker(clock=TickingClock())
    core.topic("orders", queues=8)
    core.group("g")
    for _ in range(32):
        core.send("orders", b"x")
    reply = hop.decode_pop_reply(core.reply(Kind.POP, pop("orders", "g", invisible_ms=10_000)))
    assert len(reply.deliveries) == 32
    ends = [ck.revive_at_ms for ck in core.broker.table]
    assert reply.popped_ms + 10_000 <= min(ends)


def unknown_kind(core: CoreBroker) -> bytes:
    body = bytearray(EndRecord(ReviveKind.ACK, core.broker.store.epoch, 1, 0b10).encode())
    body[1] = 99
    return bytes(body)


def change_of_a_made_up_offset(core: CoreBroker) -> bytes:
    """As brokers wrote it that believed the offset of a handle."""
    (ck,) = core.broker.table
    return ChangeRecord(
        ck.epoch,
        1 << 20,
        1 << 40,
        topic_id=ck.topic_id,
        group_id=ck.group_id,
        queue_id=ck.queue_id,
        old_epoch=ck.epoch,
        old_sequence=ck.sequence,
        revive_at_ms=0,
        client=0,
    ).encode()


@pytest.mark.parametrize("made", [unknown_kind, change_of_a_made_up_offset])
def test_a_record_that_nobody_can_read_harms_what_it_speaks_of_and_the_others_count(
    made: Callable[[CoreBroker], bytes],
) -> None:
    core = CoreBroker(disk=LyingDisk())
    core.topic("orders", queues=1)
    for body in (b"acked", b"not acked", b"unread"):
        core.send("orders", body)
    acked, _ = core.receive("orders", "g", limit=2, invisible_ms=5_000)
    core.broker.store.put_record(
        RecordKind.REVIVE, topic_id=REVIVE_TOPIC_ID, queue_id=1, body=made(core)
    )
    assert core.ack("orders", "g", acked.handle)[0].code == Code.OK
    for _ in range(2):  # it is still there at the second start
        cast(LyingDisk, core.disk).restore_power()
        core.start()
        assert core.broker.records.applier.left_out == 1
    assert bodies(core.receive("orders", "g")) == [b"unread"]
    core.advance(5_100)
    (again,) = core.receive("orders", "g")
    assert (again.head, again.attempt) == (b"not acked", 2)


# -- where a receive looks first


@pytest.mark.parametrize(("percent", "first"), [(0, b"new"), (100, b"a retry")])
def test_a_receive_is_topped_up_from_the_retries_or_begins_with_them(
    percent: int, first: bytes
) -> None:
    core = with_retries(2, percent)
    assert [delivery.head for delivery in core.receive("orders", "g", limit=1)] == [first]
    got = [delivery.head for delivery in core.receive("orders", "g", limit=2)]
    assert sorted(got) == [b"a retry", b"new"]
    assert got[0] == first


def test_a_fifth_of_the_receives_look_at_the_retries_first() -> None:
    core = with_retries(500, PopSettings().retry_first_percent)
    firsts = Counter(core.receive("orders", "g", limit=1)[0].head for _ in range(400))
    assert set(firsts) == {b"a retry", b"new"}
    assert 60 <= firsts[b"a retry"] <= 100


def test_receives_begin_at_every_queue_about_as_often() -> None:
    core = CoreBroker()
    core.topic("orders", queues=4)
    for number in range(400):
        core.send("orders", b"", queue_id=number % 4)
    firsts = Counter(core.receive("orders", "g", limit=1)[0].queue_id for _ in range(100))
    assert min(firsts[queue] for queue in range(4)) >= 15


def with_retries(count: int, percent: int) -> CoreBroker:
    """So many retries are ready, and as many new messages."""
    settings = replace(SMALL, pop=PopSettings(retry_first_percent=percent))
    core = CoreBroker(settings=settings)
    core.topic("orders", queues=1)
    for _ in range(count):
        core.send("orders", b"a retry")
    while core.receive("orders", "g", invisible_ms=1_000):
        pass
    core.advance(1_100)
    for _ in range(count):
        core.send("orders", b"new")
    return core


def test_at_the_limit_of_topics_a_message_still_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    core = CoreBroker()
    core.topic("orders", queues=1)
    core.group("g", max_attempts=2)
    core.send("orders", b"x")
    monkeypatch.setattr(registry, "TOPIC_LIMIT", 1)
    with pytest.raises(PopmqError, match="there are 1 topics, which is the limit"):
        core.topic("others")
    for attempt in (1, 2):
        (delivery,) = core.receive("orders", "g", invisible_ms=1_000)
        assert delivery.attempt == attempt
        core.advance(2_000)
    assert core.broker.registry.find_topic("%DLQ%g") is not None
