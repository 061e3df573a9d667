"""What the pull consumers of a group may not undo or repeat: resets, and copies that were sent
back.  Both survive a stop, a power cut and a failover."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from replica.pair import Pair

from popmq.common import topics
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2
from popmq.common.wire import pull_pb2 as pb
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker

MINUTE_MS = 60_000
Again = Callable[[CoreBroker], CoreBroker]


def stopped(core: CoreBroker) -> CoreBroker:
    """A clean stop leaves a snapshot of everything, so that no record is read again."""
    core.stop()
    core.start()
    return core


def cut(core: CoreBroker) -> CoreBroker:
    assert isinstance(core.disk, LyingDisk)
    core.disk.restore_power()
    core.start()
    return core


def filled(core: CoreBroker) -> CoreBroker:
    core.topic("orders", queues=1)
    core.group("g")
    for body in (b"a", b"b", b"c"):
        core.send("orders", body, queue_id=0)
    return core


def pull(core: CoreBroker, offset: int, topic: str = "orders") -> pb.PullReply:
    asked = pb.PullRequest(
        topic=topic, group="g", offset=offset, limit=32, reply_bytes=1 << 20, follows_reset=True
    )
    return pb.PullReply.FromString(core.reply(Kind.PULL, asked.SerializeToString()))


def write_offset(core: CoreBroker, offset: int) -> int:
    """As a consumer that holds the queue; returns the group's offset."""
    written = pb.UpdateOffsetRequest(topic="orders", group="g", offset=offset, only_forward=True)
    core.reply(Kind.UPDATE_OFFSET, written.SerializeToString())
    asked = pb.GetOffsetRequest(topic="orders", group="g").SerializeToString()
    return pb.OffsetReply.FromString(core.reply(Kind.GET_OFFSET, asked)).offset


def reset(core: CoreBroker, offset: int) -> None:
    to = admin_pb2.ResetOffsetRequest(topic="orders", group="g", queue_id=0, offset=offset)
    core.reply(Kind.RESET_OFFSET, to.SerializeToString())


@pytest.mark.parametrize("again", [stopped, cut])
def test_a_consumer_follows_a_reset_that_was_made_before_the_broker_started(again: Again) -> None:
    core = filled(CoreBroker())
    write_offset(core, 3)
    reset(core, 1)
    core = again(again(core))
    assert write_offset(core, 3) == 1, "what the consumer knew from before the reset"
    assert pull(core, 3).next_offset == 1
    pull(core, 1)
    assert write_offset(core, 3) == 3, "it has noticed"
    core = again(core)
    assert pull(core, 3).illegal_offset == ""


def test_a_snapshot_of_many_queues_keeps_the_marks_of_resets() -> None:
    core = filled(CoreBroker())
    core.topic("many", queues=600)
    for queue_id in range(600):
        core.send("many", b"x", queue_id=queue_id)
        to = admin_pb2.ResetOffsetRequest(topic="many", group="g", queue_id=queue_id, offset=0)
        if queue_id % 2:
            core.reply(Kind.RESET_OFFSET, to.SerializeToString())
        else:
            written = pb.UpdateOffsetRequest(topic="many", group="g", queue_id=queue_id, offset=1)
            core.reply(Kind.UPDATE_OFFSET, written.SerializeToString())
    stopped(core)
    topic = core.broker.registry.topic("many")
    marked = [
        place[2]
        for place, progress in core.broker.table.progress_items()
        if place[1] == topic.id and progress.was_reset
    ]
    assert sorted(marked) == list(range(1, 600, 2))


def send_back(core: CoreBroker, offset: int, *, dead: bool = False) -> None:
    position = pull(core, offset).messages[0].position
    asked = pb.SendBackRequest(
        group="g",
        topic="orders",
        queue_offset=offset,
        head=b"x",
        attempt=1,
        dead=dead,
        position=position,
        delay_ms=MINUTE_MS,
    )
    core.reply(Kind.SEND_BACK, asked.SerializeToString())


def stored_in(core: CoreBroker, name: str) -> int:
    topic = core.broker.registry.find_topic(name)
    return core.broker.store.queue(topic.id, 0).count if topic else 0


@pytest.mark.parametrize("again", [stopped, cut])
def test_a_copy_that_was_sent_back_before_the_broker_started_is_not_stored_again(
    again: Again,
) -> None:
    core = filled(CoreBroker())
    for offset, dead in ((0, False), (1, True)):
        send_back(core, offset, dead=dead)
    core = again(again(core))
    for offset, dead in ((0, False), (1, True), (2, False)):
        send_back(core, offset, dead=dead)
    core.advance(MINUTE_MS - 2_000)
    for offset, dead in ((0, False), (1, True)):
        send_back(core, offset, dead=dead)
    core.advance(4_000)
    assert stored_in(core, topics.dlq_topic("g")) == 1
    assert stored_in(core, topics.pull_retry_topic("g")) == 2, "of the first and the third message"
    for offset, dead in ((0, False), (1, True)):
        send_back(core, offset, dead=dead)
    core.advance(MINUTE_MS + 2_000)
    assert stored_in(core, topics.dlq_topic("g")) == 2, "each has come and may fail again"
    assert stored_in(core, topics.pull_retry_topic("g")) == 3


def test_a_copy_that_was_sent_back_is_not_stored_again_by_the_next_master(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    filled(pair.master)
    pair.follow()
    for offset, dead in ((0, False), (1, True)):
        send_back(pair.master, offset, dead=dead)
    pair.follow()
    core = pair.fail_over()
    for offset, dead in ((0, False), (1, True)):
        send_back(core, offset, dead=dead)
    core.advance(MINUTE_MS + 2_000)
    assert stored_in(core, topics.dlq_topic("g")) == 1
    assert stored_in(core, topics.pull_retry_topic("g")) == 1


def test_a_copy_whose_send_back_was_refused_may_be_sent_back_again() -> None:
    settings = replace(SMALL, timer=replace(SMALL.timer, slot_limit=1))
    core = filled(CoreBroker(settings=settings))
    send_back(core, 0)
    with pytest.raises(PopmqError) as refusal:
        send_back(core, 1)
    assert refusal.value.code == Code.TOO_MANY_REQUESTS
    core.advance(2_000)
    send_back(core, 1)
    core.advance(MINUTE_MS + 2_000)
    assert stored_in(core, topics.pull_retry_topic("g")) == 2


def test_a_dead_letter_that_was_sent_back_goes_to_the_retry_topic_of_pulls_when_redriven() -> None:
    core = filled(CoreBroker())
    send_back(core, 0, dead=True)
    redrive = admin_pb2.RedriveRequest(group="g", limit=10)
    core.reply(Kind.REDRIVE, redrive.SerializeToString())
    core.run_steps()
    assert stored_in(core, topics.pull_retry_topic("g")) == 1
