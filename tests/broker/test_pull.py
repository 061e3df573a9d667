"""Pull consumers: PULL and the offsets of groups that keep their own place."""

from typing import Any

import pytest

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import (
    FilterType,
    Kind,
    PutEntry,
    PutRequest,
    encode_put,
)
from popmq.common.topics import GroupType, MessageType, StartAt
from popmq.common.wire import admin_pb2
from popmq.common.wire import pull_pb2 as pb
from popmq.proxy.api.definition_pb2 import SystemProperties
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import Answer, CoreBroker

BLUE: dict[str, Any] = {"filter_type": FilterType.TAG, "expression": "blue"}


@pytest.fixture
def core() -> CoreBroker:
    broker = CoreBroker()
    broker.topic("orders", queues=2)
    broker.group("g")
    return broker


def send(core: CoreBroker, *bodies: str, tag: str = "") -> None:
    for body in bodies:
        core.send("orders", body.encode(), tag=tag, queue_id=0)


def request(offset: int, **more: Any) -> bytes:
    asked: dict[str, Any] = {"topic": "orders", "group": "g", "limit": 32, **more}
    asked.setdefault("reply_bytes", 1 << 20)
    return pb.PullRequest(offset=offset, **asked).SerializeToString()


def pull(core: CoreBroker, offset: int, **more: Any) -> pb.PullReply:
    return pb.PullReply.FromString(core.reply(Kind.PULL, request(offset, **more)))


def wait(core: CoreBroker, offset: int, poll_ms: int = 5_000, **more: Any) -> Answer:
    return core.ask(Kind.PULL, request(offset, poll_ms=poll_ms, **more))


def told(answer: Answer) -> pb.PullReply:
    assert answer.body is not None
    return pb.PullReply.FromString(answer.body)


def bodies(reply: pb.PullReply) -> list[str]:
    return [message.head.decode() for message in reply.messages]


def update(
    core: CoreBroker,
    offset: int,
    queue_id: int = 0,
    group: str = "g",
    *,
    only_forward: bool = False,
) -> None:
    asked = pb.UpdateOffsetRequest(topic="orders", group=group, queue_id=queue_id, offset=offset)
    asked.only_forward = only_forward
    core.reply(Kind.UPDATE_OFFSET, asked.SerializeToString())


def get(core: CoreBroker, queue_id: int = 0, group: str = "g") -> int:
    asked = pb.GetOffsetRequest(topic="orders", group=group, queue_id=queue_id)
    return pb.OffsetReply.FromString(core.reply(Kind.GET_OFFSET, asked.SerializeToString())).offset


def query(core: CoreBroker, **place: Any) -> int:
    asked = pb.QueryOffsetRequest(topic="orders", queue_id=0, **place)
    reply = core.reply(Kind.QUERY_OFFSET, asked.SerializeToString())
    return pb.OffsetReply.FromString(reply).offset


def named(core: CoreBroker, message_id: str) -> None:
    properties = SystemProperties(message_id=message_id).SerializeToString()
    entry = PutEntry(MessageType.NORMAL, message_id.encode(), properties, queue_id=0)
    core.reply(Kind.PUT, encode_put(PutRequest("orders", [entry])))


def explained(core: CoreBroker, message_id: str) -> admin_pb2.Explained:
    asked = admin_pb2.ExplainRequest(message_id=message_id, topic="orders", group="g")
    reply = admin_pb2.ExplainReply.FromString(core.reply(Kind.EXPLAIN, asked.SerializeToString()))
    (message,) = reply.messages
    (state,) = message.groups
    return state


def test_a_pull_reads_on_from_its_offset_and_says_where_the_next_begins(core: CoreBroker) -> None:
    send(core, "a", "b", "c", "d")
    first = pull(core, 1, limit=2)
    assert (bodies(first), first.next_offset) == (["b", "c"], 3)
    assert [message.queue_offset for message in first.messages] == [1, 2]
    rest = pull(core, first.next_offset)
    assert (bodies(rest), rest.next_offset) == (["d"], 4)


def test_a_pull_takes_nothing_away_from_anybody(core: CoreBroker) -> None:
    send(core, "a", "b")
    end = core.broker.store.end
    assert bodies(pull(core, 0)) == bodies(pull(core, 0)) == ["a", "b"]
    assert core.broker.store.end == end, "a pull wrote a record"
    assert len(core.receive("orders", "g")) == 2


def test_a_pull_at_the_end_waits_for_the_next_message(core: CoreBroker) -> None:
    send(core, "a")
    other, waiting = wait(core, 0, queue_id=1), wait(core, 1)  # who came first misses
    assert not waiting.heard
    send(core, "b")
    core.run_steps()
    assert (bodies(told(waiting)), told(waiting).next_offset) == (["b"], 2)
    assert not other.heard, "it waits at another queue"


def test_every_waiting_pull_of_a_queue_gets_the_message(core: CoreBroker) -> None:
    waiting = [wait(core, 0), wait(core, 0)]
    send(core, "a")
    core.run_steps()
    assert [bodies(told(answer)) for answer in waiting] == [["a"], ["a"]]


def test_a_pull_that_waited_in_vain_is_answered_at_its_time(core: CoreBroker) -> None:
    waiting = wait(core, 0, poll_ms=1_000)
    core.advance(999)
    assert not waiting.heard
    core.advance(1)
    assert (bodies(told(waiting)), told(waiting).next_offset) == ([], 0)
    assert core.broker.polling.count == 0


def test_a_pull_whose_client_left_waits_no_longer(core: CoreBroker) -> None:
    waiting = wait(core, 0)
    core.server.cancel(waiting.id)
    assert core.broker.polling.count == 0
    send(core, "a")
    core.run_steps()
    assert not waiting.heard


@pytest.mark.parametrize(("offset", "nearest"), [(3, 2), (99, 2)])
def test_an_offset_that_the_queue_lacks_is_answered_with_the_nearest(
    core: CoreBroker, offset: int, nearest: int
) -> None:
    send(core, "a", "b")
    reply = pull(core, offset)
    assert (bodies(reply), reply.next_offset) == ([], nearest)
    assert f"offset {offset} of queue 0 of topic orders: it has 0 to 2" in reply.illegal_offset


def test_a_filter_is_applied_and_the_next_offset_is_behind_what_it_passed(core: CoreBroker) -> None:
    send(core, "a", "b", tag="red")
    send(core, "c", tag="blue")
    send(core, "d", tag="red")
    reply = pull(core, 0, **BLUE)
    assert (bodies(reply), reply.next_offset) == (["c"], 4)
    reply = pull(core, 3, **BLUE)
    assert (bodies(reply), reply.next_offset) == ([], 4)


def test_a_filter_that_passes_over_thousands_goes_on_where_it_was(core: CoreBroker) -> None:
    send(core, *map(str, range(1_700)), tag="red")
    send(core, "found", tag="blue")
    assert bodies(pull(core, 0, **BLUE)) == ["found"]
    waiting = wait(core, 0, **BLUE)
    core.run_steps()
    assert bodies(told(waiting)) == ["found"]


def test_an_sql_filter_reads_what_it_chooses_from(core: CoreBroker) -> None:
    send(core, "a", "b", "c")
    reply = pull(core, 0, limit=2, filter_type=FilterType.SQL, expression="TAGS IS NULL")
    assert (bodies(reply), reply.next_offset) == (["a", "b"], 2)


def test_a_reply_ends_at_its_bytes_but_holds_one_message(core: CoreBroker) -> None:
    send(core, "x" * 5_000, "y" * 5_000)
    reply = pull(core, 0, reply_bytes=1_000)
    assert (len(reply.messages), reply.next_offset) == (1, 1)


def test_a_set_offset_is_the_groups_and_survives_a_restart(core: CoreBroker) -> None:
    send(core, "a", "b", "c")
    with pytest.raises(PopmqError, match="has no offset in queue 0") as none:
        get(core)
    assert none.value.code == Code.OFFSET_NOT_FOUND
    update(core, 2)
    core.stop()
    core.start()
    assert get(core) == 2
    assert [delivery.head for delivery in core.receive("orders", "g")] == [b"c"], (
        "pop goes on there"
    )


def test_an_offset_may_go_back(core: CoreBroker) -> None:
    send(core, "a", "b", "c")
    update(core, 3)
    update(core, 1)
    core.broker.store.release_files()
    core.start()
    assert get(core) == 1


def test_an_offset_that_is_set_already_writes_nothing(core: CoreBroker) -> None:
    send(core, "a", "b", "c")
    update(core, 2)
    end = core.broker.store.end
    update(core, 2)
    assert core.broker.store.end == end


def test_the_offset_of_an_acking_group_is_read_but_not_set_under_its_deliveries(
    core: CoreBroker,
) -> None:
    send(core, "a", "b", "c")
    got = core.receive("orders", "g", limit=2)
    with pytest.raises(PopmqError, match=r"2 messages of queue 0 .* are in flight") as refused:
        update(core, 3)
    assert refused.value.code == Code.PRECONDITION_FAILED
    core.ack("orders", "g", *(delivery.handle for delivery in got))
    assert get(core) == 2
    update(core, 3)
    assert core.receive("orders", "g") == []


def test_an_offset_behind_the_end_is_refused_and_one_queues_is_not_anothers(
    core: CoreBroker,
) -> None:
    send(core, "a")
    with pytest.raises(PopmqError, match="its end is 1") as refused:
        update(core, 2)
    assert refused.value.code == Code.ILLEGAL_OFFSET
    update(core, 1)
    with pytest.raises(PopmqError, match="no offset in queue 1"):
        get(core, queue_id=1)


def test_groups_that_start_at_the_newest_or_keep_order_may_pull(core: CoreBroker) -> None:
    send(core, "a", "b")
    core.group("late", start_at=StartAt.NEWEST)
    core.group("line", type=GroupType.FIFO)
    for group in ("late", "line"):
        update(core, 1, group=group)
        assert get(core, group=group) == 1
        assert [delivery.head for delivery in core.receive("orders", group)] == [b"b"]


def test_offsets_of_places_and_times_are_told(core: CoreBroker) -> None:
    send(core, "a")
    core.advance(1_000)
    later_ms = core.clock.wall_ms()
    send(core, "b")
    assert query(core, beginning=True) == 0
    assert query(core, end=True) == 2
    assert query(core, stored_ms=later_ms) == 1
    assert query(core, stored_ms=later_ms + 1) == 2


def test_a_queue_that_is_not_there_is_refused(core: CoreBroker) -> None:
    with pytest.raises(PopmqError, match="queue 2 of topic orders, which has 2"):
        pull(core, 0, queue_id=2)
    with pytest.raises(PopmqError, match="queue 2 of topic orders, which has 2"):
        get(core, queue_id=2)


def test_lag_and_explain_know_what_a_pull_consumer_is_done_with(core: CoreBroker) -> None:
    for message_id in ("A", "B", "C"):
        named(core, message_id)
    update(core, 2)
    asked = admin_pb2.LagRequest(group="g").SerializeToString()
    (lag,) = admin_pb2.LagReply.FromString(core.reply(Kind.LAG, asked)).lags
    assert (lag.ready, lag.in_flight) == (1, 0)
    state = explained(core, "A")
    assert (state.state, state.text) == (
        "ACKED",
        "a pull consumer set the group's offset to 2, behind it",
    )
    assert explained(core, "C").state == "READY"


def test_a_topic_that_goes_ends_its_pulls(core: CoreBroker) -> None:
    waiting = wait(core, 0)
    core.broker.registry.delete_topic("orders")
    core.run_steps()
    assert bodies(told(waiting)) == []


def send_back(core: CoreBroker, offset: int, *, attempt: int = 1, dead: bool = False) -> None:
    asked = pb.SendBackRequest(
        group="g", topic="orders", queue_offset=offset, head=b"x", attempt=attempt, dead=dead
    )
    core.reply(Kind.SEND_BACK, asked.SerializeToString())


def test_explain_follows_a_message_that_was_sent_back_into_its_retry_topic(
    core: CoreBroker,
) -> None:
    named(core, "A")
    update(core, 1)
    properties = SystemProperties(message_id="A").SerializeToString()
    returned = pb.SendBackRequest(
        group="g", topic="orders", head=b"A", properties=properties, attempt=1, delay_ms=1_000
    )
    core.reply(Kind.SEND_BACK, returned.SerializeToString())

    def states() -> list[tuple[str, str, str]]:
        asked = admin_pb2.ExplainRequest(message_id="A").SerializeToString()
        reply = admin_pb2.ExplainReply.FromString(core.reply(Kind.EXPLAIN, asked))
        return [
            (message.topic, state.group, state.state)
            for message in reply.messages
            for state in message.groups
        ]

    first = ("orders", "g", "ACKED")
    assert states() == [first, ("%RETRY%g", "", "DELAYED")]
    core.advance(2_000)
    assert states() == [first, ("%RETRY%g", "g", "READY")]
    done = pb.UpdateOffsetRequest(topic="%RETRY%g", group="g", offset=1)
    core.reply(Kind.UPDATE_OFFSET, done.SerializeToString())
    assert states() == [first, ("%RETRY%g", "g", "ACKED")]


def test_what_an_offset_passes_is_acked_but_for_what_was_sent_back_before(core: CoreBroker) -> None:
    send(core, "a", "b", "c", "d", "e")
    send_back(core, 1)
    send_back(core, 3)
    update(core, 3)
    assert core.broker.ends.of(("g", "orders")) == (0, 1, 2, 0)
    update(core, 5)
    assert core.broker.ends.of(("g", "orders")) == (0, 3, 2, 0)
    send_back(core, 1, attempt=2, dead=True)  # from the retry topic, which has its own offset
    update(core, 0)
    update(core, 1)
    assert core.broker.ends.of(("g", "orders")) == (0, 4, 2, 1)


def reset(core: CoreBroker, offset: int) -> None:
    to = admin_pb2.ResetOffsetRequest(topic="orders", group="g", queue_id=0, offset=offset)
    core.reply(Kind.RESET_OFFSET, to.SerializeToString())


def test_a_consumer_that_holds_a_queue_follows_a_reset_and_cannot_overwrite_it(
    core: CoreBroker,
) -> None:
    send(core, "a", "b", "c", "d")
    update(core, 4, only_forward=True)
    waiting = wait(core, 4, follows_reset=True)
    reset(core, 1)
    core.run_steps()
    assert (told(waiting).next_offset, bodies(told(waiting))) == (1, [])
    assert "was reset to 1" in told(waiting).illegal_offset
    update(core, 4, only_forward=True)
    assert get(core) == 1, "what the consumer knew from before the reset"
    assert pull(core, 4, follows_reset=True).next_offset == 1, "until it reads there"
    assert bodies(pull(core, 1, follows_reset=True)) == ["b", "c", "d"]
    update(core, 3, only_forward=True)
    assert get(core) == 3
    assert bodies(pull(core, 2, follows_reset=True)) == ["c", "d"]


def test_a_consumer_that_holds_a_queue_follows_a_reset_after_a_power_cut() -> None:
    disk = LyingDisk()
    core = CoreBroker(disk=disk)
    core.topic("orders", queues=1)
    core.group("g")
    send(core, "a", "b", "c")
    update(core, 3, only_forward=True)
    reset(core, 1)
    disk.restore_power()
    core.start()
    update(core, 3, only_forward=True)
    assert get(core) == 1
    assert pull(core, 3, follows_reset=True).next_offset == 1
    pull(core, 1, follows_reset=True)
    update(core, 3, only_forward=True)
    disk.restore_power()
    core.start()
    assert pull(core, 3, follows_reset=True).illegal_offset == ""


def test_a_reader_at_places_of_its_own_notices_no_reset(core: CoreBroker) -> None:
    send(core, "a", "b", "c")
    reset(core, 1)
    assert bodies(pull(core, 2)) == ["c"]
    update(core, 3)
    assert get(core) == 3


def test_an_offset_only_goes_back_for_who_may_set_it_back(core: CoreBroker) -> None:
    send(core, "a", "b", "c")
    update(core, 2, only_forward=True)
    end = core.broker.store.end
    update(core, 1, only_forward=True)
    assert (get(core), core.broker.store.end) == (2, end)
    update(core, 1)
    assert get(core) == 1
