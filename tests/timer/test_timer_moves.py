"""Pending timers of a broker group that is drained go to the groups that stay."""

import pytest
from timer.move_rig import Member, MoveRig, send_ids
from timer.timer_client import HOUR, MINUTE, SECOND, forecast, list_timers, reschedule, send

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import Kind, RecallResult
from popmq.common.topics import MessageType, TopicConfig
from popmq.common.wire.replication_pb2 import TakeTimersRequest
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.sim_disk import SimDisk


def ids(count: int, name: str = "T") -> list[str]:
    return [f"{name}{number}" for number in range(count)]


def test_pending_timers_of_a_drained_group_fire_once_at_the_others() -> None:
    rig = MoveRig("a", "b", "c")
    send_ids(rig["a"], ids(700), HOUR)
    rig["a"].drain()
    rig.move_all("a")
    assert rig["b"].pending + rig["c"].pending == 700
    assert rig["b"].pending > 0
    assert rig["c"].pending > 0
    reply = rig["a"].drain(look=True)
    assert (reply.timers, reply.leaving, reply.moved, reply.waits) == (0, 0, 700, "")
    rig.run(HOUR + MINUTE)
    assert rig.fired() == sorted(ids(700))
    assert rig["a"].fired() == []


def test_a_forecast_does_not_count_what_was_moved_away() -> None:
    rig = MoveRig("a", "b", "c")
    send_ids(rig["a"], ids(350), HOUR // 2)
    send_ids(rig["a"], ids(350, "U"), 40 * MINUTE)
    rig["a"].drain()
    seen = set()
    while rig["a"].pending:
        rig.clock.advance(1)
        rig.step()
        counted = [sum(bucket.count for bucket in forecast(rig[name]).buckets) for name in "abc"]
        assert counted[0] == rig["a"].pending
        seen.add(counted[0])
    assert len(seen) > 2
    rig.move_all("a")
    assert sum(sum(bucket.count for bucket in forecast(rig[name]).buckets) for name in "abc") == 700


def test_a_timer_beyond_the_wheels_window_moves_too() -> None:
    rig = MoveRig("a", "b")
    send_ids(rig["a"], ids(5), 300 * 24 * HOUR)  # the wheel has an hour
    rig["a"].drain()
    rig.move_all("a")
    assert [timer.message_id for timer in list_timers(rig["b"]).timers] == ids(5)


def test_a_timer_that_is_due_at_once_is_fired_where_it_is() -> None:
    rig = MoveRig("a", "b")
    send_ids(rig["a"], ["soon"], 5 * SECOND)
    send_ids(rig["a"], ["later"], HOUR)
    rig["a"].drain()
    rig.run(10 * SECOND)
    assert [body for body, _ in rig["a"].fired()] == ["soon"]
    assert rig["a"].pending == 0
    assert rig["b"].pending == 1


def test_without_another_group_the_timers_stay_and_the_drain_says_why() -> None:
    rig = MoveRig("a")
    send_ids(rig["a"], ids(3), MINUTE)
    assert "no other" not in rig["a"].drain().waits
    rig.step(3)
    reply = rig["a"].drain(look=True)
    assert reply.timers == 3
    assert "no other broker group takes them" in reply.waits
    rig.run(2 * MINUTE)
    assert rig.fired() == ids(3)


def test_until_a_controller_has_said_so_nobody_is_told_that_there_is_no_other_group() -> None:
    rig = MoveRig("a", "b")
    send_ids(rig["a"], ids(3), HOUR)
    for _ in range(2):  # what was said in an earlier drain says nothing of this one
        rig["a"].drain()
        rig["a"].mover.step(rig["a"].broker)
        text = rig["a"].drain(look=True).waits
        assert text == "no controller has said yet where the other broker groups are"
        rig.tell_peers("b")
        rig["a"].mover.step(rig["a"].broker)
        assert "no other broker group takes them" in rig["a"].drain(look=True).waits
        rig["a"].drain(undo=True)
        rig["a"].mover.step(rig["a"].broker)


def test_a_group_that_is_away_gets_no_timers_and_another_one_does() -> None:
    rig = MoveRig("a", "b", "c")
    rig.cut.add("b")
    send_ids(rig["a"], ids(300), HOUR)
    rig["a"].drain()
    for _ in range(30):
        rig.run(SECOND, parts=5)
    assert rig["c"].pending == 300
    assert rig["b"].pending == 0


def test_a_batch_that_is_on_its_way_is_fired_by_nobody_until_it_was_taken() -> None:
    rig = MoveRig("a", "b")
    send_ids(rig["a"], ids(3), MINUTE)
    rig["a"].drain()
    while not rig["a"].broker.timers.outgoing_timers.is_under_way:
        rig.step()
        if rig["a"].broker.timers.outgoing_timers.is_under_way:
            break
    rig.instant = False
    rig.mail.clear()
    rig["a"].crash()  # whatever the other one was told, it is asked again
    rig["b"].crash()
    rig.cut.add("b")
    already = rig["b"].pending
    rig.run(2 * MINUTE)
    assert rig["a"].fired() == []
    assert len(rig["b"].fired()) == already
    assert rig["a"].drain(look=True).leaving == 3
    rig.cut.clear()
    rig.instant = True
    rig.run(10 * SECOND)
    assert rig.fired() == ids(3)
    assert rig["a"].drain(look=True).moved == 3


def test_undo_ends_the_batch_that_is_on_its_way_and_moves_no_more() -> None:
    rig = MoveRig("a", "b", moves_per_second=10)
    send_ids(rig["a"], ids(50), HOUR)
    rig["a"].drain()
    rig.cut.add("b")
    rig.step(3)
    rig.cut.clear()
    rig.run(SECOND)
    rig.cut.add("b")
    rig.run(3 * SECOND)
    rig["a"].drain(undo=True)
    rig.cut.clear()
    rig.run(MINUTE)
    reply = rig["a"].drain(undo=True, look=True)
    assert not reply.draining
    assert reply.leaving == 0
    assert 0 < reply.moved < 50
    assert reply.timers + reply.moved == 50
    assert rig["b"].pending == reply.moved
    send(rig["a"], "new", rig.clock.wall_ms() + HOUR)
    rig.run(2 * HOUR)
    assert rig.fired() == sorted([*ids(50), "new"])


def test_moves_keep_to_their_rate() -> None:
    rig = MoveRig("a", "b", moves_per_second=20)
    send_ids(rig["a"], ids(100), HOUR)
    rig["a"].drain()
    rig.run(2 * SECOND)
    assert 20 <= rig["b"].pending <= 60
    rig.run(4 * SECOND)
    assert rig["b"].pending == 100


def test_a_tenth_of_what_may_be_remembered_is_left_to_recalls() -> None:
    rig = MoveRig("a", "b", cancelled_limit=100)
    send_ids(rig["a"], ids(120), HOUR)
    rig["a"].drain()
    rig.run(5 * SECOND)
    reply = rig["a"].drain(look=True)
    assert (reply.moved, reply.timers) == (90, 30)
    assert "timer.cancelled_limit" in reply.waits
    assert rig["a"].recall("T119").outcome == RecallResult.DONE


def test_a_recall_of_a_moved_timer_names_the_group_that_has_it() -> None:
    rig = MoveRig("a", "b")
    send_ids(rig["a"], ids(2), HOUR)
    rig["a"].drain()
    rig.move_all("a")
    reply = rig["a"].recall("T0")
    assert (reply.outcome, list(reply.moved_to)) == (RecallResult.NOT_FOUND, ["b"])
    assert rig["b"].recall("T0").outcome == RecallResult.DONE
    assert rig["b"].recall("T0").outcome == RecallResult.DONE
    assert reschedule(rig["a"], "T1", -MINUTE).outcome == RecallResult.NOT_FOUND
    assert reschedule(rig["b"], "T1", -MINUTE).outcome == RecallResult.DONE
    rig.run(2 * HOUR)
    assert rig.fired() == ["T1"]


def test_a_timer_that_was_recalled_before_it_left_does_not_move() -> None:
    rig = MoveRig("a", "b")
    send_ids(rig["a"], ids(3), HOUR)
    assert rig["a"].recall("T1").outcome == RecallResult.DONE
    rig["a"].drain()
    rig.move_all("a")
    assert rig["b"].pending == 2
    assert rig["a"].recall("T1").outcome == RecallResult.DONE
    rig.run(2 * HOUR)
    assert rig.fired() == ["T0", "T2"]


def test_a_timer_moves_on_when_its_new_group_is_drained_too() -> None:
    rig = MoveRig("a", "b", "c")
    rig["c"].drain()
    send_ids(rig["a"], ids(10), HOUR)
    rig["a"].drain()
    rig.move_all("a")
    assert rig["b"].pending == 10
    rig["c"].drain(undo=True)
    rig["b"].drain()
    rig.move_all("b")
    assert rig["c"].pending == 10
    assert list(rig["b"].recall("T3").moved_to) == ["c"]
    rig.run(2 * HOUR)
    assert [body for body, _ in rig["c"].fired()] == ids(10)
    assert rig["a"].fired() == rig["b"].fired() == []


def leaving(rig: MoveRig, count: int) -> None:
    """So many timers of "a" are on their way to "b", which took them; its answer is lost."""
    send_ids(rig["a"], ids(count), HOUR)
    rig["a"].drain()
    while not rig["b"].pending:
        rig.instant = not rig["a"].broker.timers.outgoing_timers.is_under_way
        rig.step()
        for target, work in rig.mail:
            if target is not None:
                work()
                target.run_until_idle()
        rig.mail.clear()
    rig.lose()
    assert rig["a"].drain(look=True).leaving == count == rig["b"].pending
    rig.instant = True


def restarted(member: Member, how: str) -> None:
    """With the tables out of a snapshot, or out of the records."""
    if how == "snapshot":
        member.stop()
        member.start()
    else:
        member.crash()
    member.run_steps()  # what is confirmed is enqueued again


def tables(member: Member) -> list[bytes]:
    return [
        piece
        for table in member.broker.timers.tables
        for piece, _ in sorted(table.begin_snapshot())
    ]


@pytest.mark.parametrize("how", ["snapshot", "records"])
@pytest.mark.parametrize("crashed_side", ["a", "b"])
def test_a_batch_that_is_asked_for_again_after_a_start_is_stored_once(
    crashed_side: str, how: str
) -> None:
    rig = MoveRig("a", "b")
    leaving(rig, 40)
    rig[crashed_side].run_steps()
    before = tables(rig[crashed_side])
    restarted(rig[crashed_side], how)
    assert tables(rig[crashed_side]) == before
    rig.move_all("a")
    assert rig["b"].pending == 40
    for member in (rig["a"], rig["b"]):
        member.run_steps()
        before = tables(member)
        restarted(member, how)
        assert tables(member) == before
    rig.run(2 * HOUR)
    assert rig.fired() == sorted(ids(40))


def test_nobody_is_asked_before_the_departure_is_on_the_disk() -> None:
    rig = MoveRig("a", "b")
    send_ids(rig["a"], ids(3), HOUR)
    rig["a"].drain()
    source = rig["a"]
    while not source.broker.timers.outgoing_timers.is_under_way:
        rig.tell_peers()
        source.mover.step(source.broker)
        rig["b"].run_until_idle()
    for _ in range(5):
        source.mover.step(source.broker)
    assert not any(TakeTimersRequest.FromString(body).timers for _, body in rig.asked)
    source.crash(Loss.ALL)
    assert (source.pending, rig["b"].pending) == (3, 0)
    assert not source.broker.timers.outgoing_timers.is_under_way


def test_a_recall_of_a_timer_on_its_way_is_told_to_try_again() -> None:
    rig = MoveRig("a", "b")
    leaving(rig, 2)
    for ask in (lambda: rig["a"].recall("T0"), lambda: reschedule(rig["a"], "T0", -MINUTE)):
        with pytest.raises(PopmqError, match="is being moved to broker group b: try again"):
            ask()
    rig.move_all("a")
    assert list(rig["a"].recall("T0").moved_to) == ["b"]


def test_timers_of_a_topic_that_the_other_group_does_not_know_yet_wait_for_it() -> None:
    rig = MoveRig("a", "b")
    rig["a"].topic("fresh", type=MessageType.DELAY)
    send(rig["a"], "T0", rig.clock.wall_ms() + HOUR, topic="fresh")
    rig["a"].run_steps()
    rig["b"].broker.registry.owner = "c"
    rig["a"].drain()
    rig.run(5 * SECOND)
    reply = rig["a"].drain(look=True)
    assert reply.leaving == 1
    assert "has no topic fresh" in reply.waits
    assert rig["b"].broker.registry.missing_topics == {"fresh"}
    rig["b"].broker.registry.owner = ""
    rig["b"].topic("fresh", type=MessageType.DELAY)
    rig.move_all("a")
    assert rig["b"].broker.timers.state.pending_total == 1


def test_timers_of_a_deleted_topic_move_and_become_dead_letters_there() -> None:
    rig = MoveRig("a", "b")
    send_ids(rig["a"], ids(2), HOUR)
    for member in (rig["a"], rig["b"]):
        member.broker.registry.remove_topic(member.broker.registry.topic("orders"))
        member.run_until_idle()
    rig["a"].drain()
    rig.move_all("a")
    rig.run(2 * HOUR)
    assert rig["b"].broker.timers.service.dead_lettered == 2


def test_timers_of_another_cluster_or_of_the_group_itself_are_refused() -> None:
    rig = MoveRig("a", "b")
    for cluster, group, origin in (("other", "a", 1), ("popmq", "b", 1), ("popmq", "a", 0)):
        request = TakeTimersRequest(cluster=cluster, group=group, origin=origin)
        with pytest.raises(Refused, match="takes no timers of") as refused:
            rig["b"].reply(Kind.TAKE_TIMERS, request.SerializeToString())
        assert refused.value.code == Code.BAD_REQUEST


def test_a_message_moves_whole() -> None:
    """Body, properties, tag and queue are what the client sent."""
    rig = MoveRig("a", "b")
    config = TopicConfig(0, "wide", 8, MessageType.DELAY)
    for member in (rig["a"], rig["b"]):
        member.broker.registry.create_topic(config)
        member.run_until_idle()
    sent = send(rig["a"], "T0", rig.clock.wall_ms() + HOUR, topic="wide", body=b"the body")
    rig["a"].run_steps()
    rig["a"].drain()
    rig.move_all("a")
    rig.run(2 * HOUR)
    (got,) = rig["b"].receive("wide", "g")
    assert (got.queue_id, got.head, got.attempt) == (sent.queue_id, b"the body", 1)
    assert b"T0" in got.properties


@pytest.mark.parametrize("moved", [False, True], ids=["before its drain", "in the middle of it"])
def test_a_group_restored_from_a_backup_hands_over_all_that_it_has_then(moved: bool) -> None:
    """What others know of moves is of the group that went on: none of them was of these."""
    rig = MoveRig("a", "b")
    a = rig["a"]
    send_ids(a, ids(10), HOUR)
    if moved:
        a.drain()
        rig.move_all("a")
        a.drain(undo=True)
    a.run_until_idle()
    left = a.pending
    assert isinstance(a.disk, SimDisk)
    backup = a.disk.copy_of_durable()
    send_ids(a, ids(100, "lost"), HOUR)
    a.drain()
    rig.move_all("a")
    a.broker.release_files()
    a.disk = backup
    a.start()
    a.run_steps()
    assert a.pending == left
    send_ids(a, ids(50, "new"), HOUR)
    a.drain()
    rig.move_all("a")
    rig.run(HOUR + MINUTE)
    assert a.fired() == []
    # It knows nothing of what it handed over, and does so again.
    assert rig.fired() == sorted(ids(10) + ids(left) + ids(100, "lost") + ids(50, "new"))
