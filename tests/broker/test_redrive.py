"""Dead letters with their origin, and their way back: each once, whatever crashes."""

from contextlib import suppress

import pytest

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.topics import GroupType, MessageType
from popmq.common.wire import admin_pb2 as pb
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.disk.lying_disk import LyingDisk, PowerCut
from popmq.testing.harness.core_broker import CoreBroker


def made(disk: LyingDisk | None = None) -> CoreBroker:
    core = CoreBroker(disk=disk or LyingDisk())
    core.topic("orders", queues=2)
    core.group("g", max_attempts=2)
    core.group("other")
    return core


@pytest.fixture
def core() -> CoreBroker:
    return made()


def letters(core: CoreBroker, group: str = "g", **more: object) -> pb.ListDeadLettersReply:
    request = pb.ListDeadLettersRequest(group=group, **more)  # type: ignore[arg-type]
    reply = core.reply(Kind.LIST_DEAD_LETTERS, request.SerializeToString())
    return pb.ListDeadLettersReply.FromString(reply)


def redrive(core: CoreBroker, group: str = "g", **more: object) -> pb.Redriven:
    request = pb.RedriveRequest(group=group, **more)  # type: ignore[arg-type]
    reply = pb.RedriveReply.FromString(core.reply(Kind.REDRIVE, request.SerializeToString()))
    (progress,) = reply.progress
    return progress


def kill(core: CoreBroker, *bodies: bytes, topic: str = "orders", group: str = "g") -> None:
    """Send messages that the group rejects."""
    for body in bodies:
        core.send(topic, body, tag=body.decode())
    for delivery in core.receive(topic, group):
        assert core.reject(topic, group, delivery.handle).code == Code.OK


def heads(deliveries: list[Delivery]) -> list[bytes]:
    return sorted(delivery.head for delivery in deliveries)


def test_a_dead_letter_tells_where_it_comes_from_and_why(core: CoreBroker) -> None:
    began_ms = core.clock.wall_ms()
    core.send("orders", b"expires", queue_id=1)
    core.receive("orders", "g", invisible_ms=1_000)
    core.advance(2_000)
    core.receive("orders", "g", invisible_ms=1_000)
    core.advance(2_000)
    kill(core, b"rejected")
    expired, rejected = letters(core).letters
    assert (expired.reason, expired.attempts) == ("max attempts", 2)
    assert (rejected.reason, rejected.attempts) == ("rejected", 1)
    assert (expired.origin_topic, expired.origin_queue_id, expired.origin_offset) == (
        "orders",
        1,
        0,
    )
    assert abs(expired.first_delivery_ms - began_ms) <= 20
    assert abs(expired.last_delivery_ms - (began_ms + 2_000)) <= 250
    assert expired.dead_ms >= expired.last_delivery_ms + 1_000
    assert (expired.queue_offset, rejected.queue_offset) == (0, 1)
    assert [dead_letter.head for dead_letter in letters(core, bodies=True).letters] == [
        b"expires",
        b"rejected",
    ]
    assert not any(
        dead_letter.head or dead_letter.redriven for dead_letter in letters(core).letters
    )


def test_a_timer_whose_topic_was_deleted_is_listed_as_a_dead_letter(core: CoreBroker) -> None:
    assert not letters(core, "CID_RMQ_SYS_TIMER").letters
    core.topic("later", type=MessageType.DELAY)
    entry = hop.PutEntry(MessageType.DELAY, b"body", b"", due_ms=-60_000)
    core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("later", [entry])))
    core.broker.registry.delete_topic("later")
    core.advance(61_000)
    (letter,) = letters(core, "CID_RMQ_SYS_TIMER", bodies=True).letters
    assert (letter.reason, letter.origin_topic, letter.redriven) == ("topic deleted", "", False)
    assert letter.head == b"body"
    with pytest.raises(PopmqError, match="is a system group"):
        letters(core, "CID_RMQ_SYS_OTHER")


def test_dead_letters_are_listed_in_pieces(core: CoreBroker) -> None:
    kill(core, *(b"%d" % number for number in range(7)))
    first = letters(core, limit=5)
    (where,) = first.ranges
    assert (len(first.letters), where.next_offset, where.end_offset) == (5, 5, 7)
    rest = letters(core, from_offset=where.next_offset, limit=5)
    assert [dead_letter.queue_offset for dead_letter in rest.letters] == [5, 6]
    assert letters(core, broker="elsewhere").ranges == []
    assert letters(core, "other").letters == []


def test_a_redriven_letter_comes_back_to_its_group_with_a_fresh_count(core: CoreBroker) -> None:
    kill(core, b"one")
    core.receive("orders", "other")
    progress = redrive(core)
    assert (progress.redriven, progress.next_offset, progress.end_offset) == (1, 1, 1)
    (delivery,) = core.receive("orders", "g", invisible_ms=1_000)
    assert (delivery.head, delivery.attempt) == (b"one", 1)
    assert core.receive("orders", "other") == [], "another group got it twice"
    core.advance(2_000)
    (again,) = core.receive("orders", "g", invisible_ms=1_000)
    assert again.attempt == 2
    core.advance(2_000)
    first, second = letters(core).letters
    assert (first.redriven, second.redriven) == (True, False)
    assert (second.reason, second.attempts) == ("max attempts", 2)
    assert (second.origin_topic, second.origin_offset) == ("orders", first.origin_offset)
    assert second.first_delivery_ms >= first.last_delivery_ms


def test_a_second_redrive_passes_over_what_was_redriven(core: CoreBroker) -> None:
    kill(core, b"one", b"two")
    assert redrive(core, limit=1).redriven == 1
    progress = redrive(core)
    assert (progress.redriven, progress.already) == (1, 1)
    assert heads(core.receive("orders", "g")) == [b"one", b"two"]
    assert redrive(core).redriven == 0
    assert core.receive("orders", "g") == []


def test_a_redriven_letter_stays_readable_for_other_groups(core: CoreBroker) -> None:
    kill(core, b"one")
    redrive(core)
    assert heads(core.receive("%DLQ%g", "other")) == [b"one"]


def test_a_dry_run_counts_and_writes_nothing(core: CoreBroker) -> None:
    kill(core, b"one", b"two")
    end = core.broker.store.end
    assert redrive(core, dry_run=True).redriven == 2
    assert core.broker.store.end == end
    assert core.receive("orders", "g") == []


def test_letters_that_die_during_a_redrive_are_left_to_the_next(core: CoreBroker) -> None:
    kill(core, b"one")
    end = redrive(core, dry_run=True).end_offset
    kill(core, b"two")
    assert redrive(core, end_offset=end).redriven == 1
    assert [dead_letter.redriven for dead_letter in letters(core).letters] == [True, False]


def with_keys(core: CoreBroker, body: bytes, *keys: str) -> None:
    properties = api.SystemProperties(keys=keys).SerializeToString()
    entry = hop.PutEntry(MessageType.NORMAL, body, properties)
    core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])))


def test_a_filter_by_tag_key_topic_and_time_takes_those_alone(core: CoreBroker) -> None:
    core.topic("bills", queues=1)
    kill(core, b"tagged", b"plain")
    with_keys(core, b"keyed", "k1", "k2")
    kill(core)
    core.clock.advance(10_000)
    late_ms = core.clock.wall_ms()
    kill(core, b"bill", topic="bills")

    def would(**fields: object) -> tuple[int, int]:
        progress = redrive(core, "g", dry_run=True, **fields)
        return progress.redriven, progress.filtered

    assert would() == (4, 0)
    assert would(tag="tagged") == (1, 3)
    assert would(key="k2") == (1, 3)
    assert would(key="k") == (0, 4)
    assert would(topic="bills") == (1, 3)
    assert would(after_ms=late_ms) == (1, 3)
    assert would(before_ms=late_ms) == (3, 1)
    assert would(tag="tagged", topic="bills") == (0, 4)
    assert redrive(core, topic="bills").redriven == 1
    assert heads(core.receive("bills", "g")) == [b"bill"]
    assert core.receive("orders", "g") == []


def test_a_filter_by_reason_takes_those_alone_and_says_that_it_was_looked_at(
    core: CoreBroker,
) -> None:
    core.send("orders", b"expires")
    for _ in range(2):
        core.receive("orders", "g", invisible_ms=1_000)
        core.advance(2_000)
    kill(core, b"rejected")
    assert redrive(core, dry_run=True).reason == ""
    progress = redrive(core, reason="rejected")
    assert (progress.redriven, progress.filtered, progress.reason) == (1, 1, "rejected")
    assert heads(core.receive("orders", "g")) == [b"rejected"]
    assert redrive(core, reason="max attempts").redriven == 1


def test_a_letter_whose_topic_was_deleted_has_nowhere_to_go(core: CoreBroker) -> None:
    kill(core, b"one")
    core.broker.registry.delete_topic("orders")
    core.topic("orders")  # another topic of the same name
    progress = redrive(core)
    assert (progress.redriven, progress.orphaned) == (0, 1)
    assert letters(core).letters[0].origin_topic == ""
    assert core.receive("orders", "g") == []


def test_the_letters_of_a_deleted_group_go_to_the_one_that_has_its_name_now(
    core: CoreBroker,
) -> None:
    kill(core, b"one")
    core.broker.registry.delete_group("g")
    core.group("g")
    (mine,) = core.receive("orders", "g")
    core.ack("orders", "g", mine.handle)
    assert redrive(core).redriven == 1
    (again,) = core.receive("orders", "g")
    assert (again.head, again.attempt) == (b"one", 1)
    assert redrive(core).already == 1


def test_a_fifo_groups_letter_goes_behind_its_origin_queue() -> None:
    core = made()
    kill(core, b"one")
    (letter,) = letters(core).letters
    group = core.broker.registry.group("g")
    fifo = type(group)(group.id, "g", GroupType.FIFO)
    core.broker.registry._groups["g"] = core.broker.registry._groups_by_id[group.id] = fifo
    redrive(core)
    topic = core.broker.registry.topic("orders")
    assert core.broker.store.queue(topic.id, letter.origin_queue_id).count == 2
    (first, second) = core.broker.lookup.at(topic.id, letter.origin_queue_id, 0, limit=2).messages
    assert (first.head, second.head, second.attempt) == (b"one", b"one", 1)


def test_another_groups_first_copy_is_the_message_itself_whatever_token_it_has() -> None:
    """A redriven copy in a base topic names the place of another life."""
    core = made()
    kill(core, b"one")
    group = core.broker.registry.group("g")
    fifo = type(group)(group.id, "g", GroupType.FIFO)
    core.broker.registry._groups["g"] = core.broker.registry._groups_by_id[group.id] = fifo
    redrive(core)
    for delivery in core.receive("orders", "other"):
        core.reject("orders", "other", delivery.handle)
    assert sorted(dead_letter.origin_offset for dead_letter in letters(core, "other").letters) == [
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"group": "nobody"}, Code.CONSUMER_GROUP_NOT_FOUND),
        ({"group": "CID_RMQ_SYS_TIMER"}, Code.ILLEGAL_CONSUMER_GROUP),
        ({"limit": 1_001}, Code.BAD_REQUEST),
        ({"limit": -1}, Code.BAD_REQUEST),
        ({"from_offset": -1}, Code.BAD_REQUEST),
        ({"topic": "nowhere"}, Code.TOPIC_NOT_FOUND),
    ],
)
def test_an_impossible_redrive_is_refused(
    core: CoreBroker, fields: dict[str, object], code: Code
) -> None:
    group = str(fields.pop("group", "g"))
    with pytest.raises(PopmqError) as caught:
        redrive(core, group, **fields)
    assert caught.value.code == code


def test_a_full_disk_stops_a_redrive_and_loses_nothing(core: CoreBroker) -> None:
    kill(core, b"one")
    core.broker.store.guard.index_blocked = True
    with pytest.raises(PopmqError):
        redrive(core)
    core.broker.store.guard.index_blocked = False
    assert redrive(core).redriven == 1


@pytest.mark.more
def test_a_power_cut_at_any_moment_of_a_redrive_loses_none_and_doubles_none() -> None:
    for cut in range(1, 40):
        disk = LyingDisk()
        core = made(disk)
        core.receive("orders", "g")
        kill(core, *(b"%02d" % number for number in range(12)))
        got: list[bytes] = []
        disk.cut_at(cut)
        with suppress(PowerCut, PopmqError, AssertionError):
            for _ in range(4):
                redrive(core, limit=3)
                for delivery in core.receive("orders", "g"):
                    if core.ack("orders", "g", delivery.handle)[0].code == Code.OK:
                        got.append(delivery.head)
        disk.restore_power()
        core.start()
        redrive(core)
        core.advance(70_000)  # what was delivered before the cut and not acked comes back
        while batch := core.receive("orders", "g"):
            for delivery in batch:
                core.ack("orders", "g", delivery.handle)
                got.append(delivery.head)
        assert sorted(got) == [b"%02d" % number for number in range(12)], cut
        assert all(dead_letter.redriven for dead_letter in letters(core).letters), cut


@pytest.mark.parametrize("clean", [True, False])
def test_what_was_redriven_is_known_after_a_restart(clean: bool) -> None:
    disk = LyingDisk()
    core = made(disk)
    kill(core, *(b"%d" % number for number in range(9)))
    redrive(core, limit=4)
    for _ in range(2):
        if clean:
            core.stop()
        else:
            disk.restore_power()
        core.start()
        assert [dead_letter.redriven for dead_letter in letters(core).letters] == [True] * 4 + [
            False
        ] * 5
    assert redrive(core).redriven == 5
    assert len(core.receive("orders", "g")) == 9
