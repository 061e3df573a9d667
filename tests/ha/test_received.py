"""What clients are told before disks have it: sends of a topic in memory, buffered receives."""

from functools import partial

import pytest
from ha.node_rig import TOPIC, Node, Rig

from popmq.broker.ha.memory_confirmation import MemoryConfirmation
from popmq.broker.ha.role import BrokerRole
from popmq.broker.ha.slave_progress import SlaveProgress
from popmq.broker.ha.sync_state import AlterSyncStateSet, SyncState
from popmq.broker.ha.sync_state_set_updater import SyncStateSetUpdater
from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.protocol.replication_payloads import Fetch, Handshake, encode_handshake
from popmq.common.topics import (
    CheckPoints,
    Durability,
    MessageType,
    SubscriptionGroup,
    TopicConfig,
)
from popmq.testing.harness.core_broker import Answer, pop

QUICK = "quick"


@pytest.fixture
def rig() -> Rig:
    """Three replicas, two of which have to be in the set; no disk is slow yet."""
    rig = Rig()
    rig.ready()
    rig.make_topic()
    registry = rig.master.node.broker.registry
    registry.create_topic(TopicConfig(0, QUICK, 4, durability=Durability.MEMORY))
    registry.create_group(SubscriptionGroup(0, "buffered", check_points=CheckPoints.BUFFERED))
    rig.advance(100)
    return rig


def send(rig: Rig, body: bytes, *, to: Node | None = None, half: bool = False) -> Answer:
    kind = MessageType.TRANSACTION if half else MessageType.NORMAL
    entry = hop.PutEntry(kind, body, b"")
    return rig.ask(Kind.PUT, hop.encode_put(hop.PutRequest(QUICK, [entry])), of=to)


def hold_disks(rig: Rig) -> None:
    for node in rig.nodes:
        node.flusher.held = True


def release_disks(rig: Rig) -> None:
    for node in rig.nodes:
        node.flusher.release()
    rig.settle()


def slaves(rig: Rig) -> list[Node]:
    return [node for node in rig.nodes if node is not rig.master]


def test_a_send_in_memory_is_answered_when_all_of_the_set_hold_it_and_no_disk_does(
    rig: Rig,
) -> None:
    hold_disks(rig)
    waiting = rig.send(b"on disks")
    quick = send(rig, b"in memory")
    rig.advance(50)
    assert quick.body is not None
    assert not waiting.heard
    assert rig.master.node.broker.store.durable < rig.master.end
    release_disks(rig)
    assert waiting.heard


def test_one_member_that_did_not_receive_it_keeps_a_send_in_memory_waiting(rig: Rig) -> None:
    late = slaves(rig)[1]
    rig.cut(late.name)
    quick = send(rig, b"x")
    rig.advance(500)
    assert not quick.heard
    rig.heal()
    rig.until(lambda: quick.heard)
    assert quick.body is not None


def test_what_is_in_memory_is_read_when_it_is_on_disks(rig: Rig) -> None:
    hold_disks(rig)
    assert send(rig, b"x").body is not None
    ask = partial(rig.ask, Kind.POP, pop(QUICK, "g", limit=1, invisible_ms=60_000))
    empty = ask()
    release_disks(rig)
    rig.advance(50)
    assert empty.body is not None
    assert not hop.decode_pop_reply(empty.body).deliveries
    answer = ask()
    rig.until(lambda: answer.heard)
    assert answer.body is not None
    assert [delivery.head for delivery in hop.decode_pop_reply(answer.body).deliveries] == [b"x"]


def test_the_death_of_the_master_alone_loses_nothing_that_was_in_memory(rig: Rig) -> None:
    hold_disks(rig)
    assert send(rig, b"kept").body is not None
    left = slaves(rig)
    rig.master.kill(power=True)
    for node in left:
        node.flusher.release()
    rig.ready(members=2)
    answer = rig.ask(Kind.POP, pop(QUICK, "g", limit=1, invisible_ms=60_000))
    rig.until(lambda: answer.heard)
    assert answer.body is not None
    assert [delivery.head for delivery in hop.decode_pop_reply(answer.body).deliveries] == [b"kept"]


def test_a_power_cut_of_all_of_the_set_loses_what_was_only_in_memory(rig: Rig) -> None:
    """The documented loss."""
    assert send(rig, b"on disks").body is not None
    rig.advance(100)
    hold_disks(rig)
    assert send(rig, b"lost").body is not None
    for node in rig.nodes:
        node.kill(power=True)
    for node in rig.nodes:
        node.start()
    rig.ready()
    answer = rig.ask(Kind.POP, pop(QUICK, "g", limit=8, invisible_ms=60_000))
    rig.until(lambda: answer.heard)
    assert answer.body is not None
    assert [delivery.head for delivery in hop.decode_pop_reply(answer.body).deliveries] == [
        b"on disks"
    ]


def test_a_master_that_is_cut_off_answers_no_send_in_memory(rig: Rig) -> None:
    old = rig.master
    rig.cut(old.name)
    lost = [send(rig, b"lost", to=old) for _ in range(3)]
    rig.until(lambda: rig.master is not old and len(rig.masters) == 2)
    rig.advance(3_000)
    rig.heal()
    rig.until(lambda: old.role is BrokerRole.SLAVE and old.end == rig.master.end)
    assert not any(answer.body for answer in lost)


def test_a_send_in_memory_is_refused_while_too_few_replicas_are_there(rig: Rig) -> None:
    for node in slaves(rig):
        node.kill()
    rig.advance(4_000)
    answer = send(rig, b"x")
    assert answer.error is not None
    assert answer.error.code is Code.HA_NOT_AVAILABLE


def test_a_half_message_waits_for_disks_whatever_its_topic_says(rig: Rig) -> None:
    registry = rig.master.node.broker.registry
    registry.create_topic(
        TopicConfig(0, "mixed", 4, MessageType.MIXED, durability=Durability.MEMORY)
    )
    rig.advance(100)
    hold_disks(rig)
    entry = hop.PutEntry(MessageType.TRANSACTION, b"half", b"", message_id="half-1")
    half = rig.ask(Kind.PUT, hop.encode_put(hop.PutRequest("mixed", [entry])))
    rig.advance(50)
    assert not half.heard
    release_disks(rig)
    assert half.body is not None


def test_a_buffered_receive_waits_until_all_of_the_set_spoke_after_it(rig: Rig) -> None:
    rig.send(b"one")
    rig.advance(100)
    late = slaves(rig)[1]
    rig.cuts.add((late.address, rig.master.address))
    answer = rig.ask(Kind.POP, pop(TOPIC, "buffered", limit=1, invisible_ms=60_000))
    rig.advance(300)
    assert not answer.heard
    rig.heal()
    rig.until(lambda: answer.heard)
    assert answer.body is not None


def test_buffered_receives_are_answered_at_once_by_a_group_in_sync(rig: Rig) -> None:
    for number in range(3):
        rig.send(b"%d" % number)
    rig.advance(100)
    end = rig.master.end
    for _ in range(3):
        answer = rig.ask(Kind.POP, pop(TOPIC, "buffered", limit=1, invisible_ms=60_000))
        assert answer.body is not None
    assert rig.master.end == end


def test_a_master_that_is_cut_off_gives_no_buffered_receive_an_answer(rig: Rig) -> None:
    """Another master may have acknowledged the message meanwhile (I5)."""
    rig.send(b"one")
    rig.advance(100)
    old = rig.master
    rig.cut(old.name)
    asked = pop(TOPIC, "buffered", limit=1, invisible_ms=60_000)
    early = rig.ask(Kind.POP, asked, of=old)
    rig.until(lambda: rig.master is not old and len(rig.masters) == 2)
    late = rig.ask(Kind.POP, asked, of=old)
    rig.advance(1_000)
    rig.heal()
    rig.until(lambda: old.role is BrokerRole.SLAVE and old.end == rig.master.end)
    assert early.body is None
    assert late.body is None or not hop.decode_pop_reply(late.body).deliveries


def test_nobody_joins_the_set_who_does_not_hold_what_was_promised() -> None:
    sync = SyncState(
        "a", epoch=1, epoch_start=0, members={"a"}, version=1, min_in_sync=1, confirmed=0
    )
    sync.received_positions["a"] = 100
    sync.acknowledge_early(sync.received)
    sync.on_fsynced("a", 50)
    sync.on_fsynced("b", 50)
    assert sync.expand("b") is None
    sync.received_positions["a"] = 200
    assert sync.received == 100  # what comes waits for the candidate, too
    sync.received_positions["b"] = 100
    expected = sync.expand("b")
    assert expected is not None
    assert expected.sync_state_set == {"a", "b"}
    assert not sync.joining
    assert sync.received == 100
    sync.received_positions["b"] = 200
    assert sync.received == 200


def test_a_candidate_that_fell_behind_is_not_waited_for() -> None:
    sync = SyncState(
        "a", epoch=1, epoch_start=0, members={"a"}, version=1, min_in_sync=1, confirmed=0
    )
    sync.received_positions["a"] = 100
    sync.acknowledge_early(100)
    sync.on_fsynced("b", 0)
    assert sync.expand("b") is None
    sync.received_positions["a"] = 200
    sync.stop_waiting_for("b")
    assert sync.received == 200


class NoController:
    reachable = True

    def alter(self, alter: AlterSyncStateSet) -> None:
        return


def test_a_candidate_that_is_gone_is_left_out() -> None:
    sync = SyncState(
        "a", epoch=1, epoch_start=0, members={"a"}, version=1, min_in_sync=1, confirmed=0
    )
    sync.joining = frozenset("b")
    keeper = SyncStateSetUpdater(
        sync,
        {},
        NoController(),
        laggard_ms=1_000,
        near_bytes=100,
        began_ms=0,
    )
    keeper.step(end=0, now_ms=10)
    assert not sync.joining


def test_a_fetch_that_was_sent_before_the_receive_says_nothing_of_the_time_after_it() -> None:
    sync = SyncState(
        "a", epoch=1, epoch_start=0, members={"a", "b"}, version=1, min_in_sync=2, confirmed=0
    )
    slave = SlaveProgress("b", "node-b", 7, last_seen_ms=0, caught_up_ms=0)
    received = MemoryConfirmation(
        sync, {"b": slave}, end=lambda: 0, soon=lambda work: work(), nudge=lambda: None
    )
    texts: list[str] = []
    received.when_leadership_confirmed(lambda: texts.append("told"))
    slave.sent_round = received.heartbeat_round
    old = Fetch(1, "b", 7, 0, 100, 0, 500, round=received.heartbeat_round - 1)
    received.on_fetch(slave, old)
    received.release_ready()
    assert not texts
    received.on_fetch(slave, old._replace(round=received.heartbeat_round))
    received.release_ready()
    assert texts


def test_what_a_slave_held_in_memory_does_not_count_once_it_has_restarted(rig: Rig) -> None:
    hold_disks(rig)
    assert send(rig, b"x").body is not None
    leadership = rig.master.node.master_role
    assert leadership is not None
    sync, slave = leadership.replication_server.sync, slaves(rig)[0].node
    assert sync.received_position(slave.identity.store_id) == rig.master.end
    settings, end = rig.settings, slave.broker.store.durable
    asked = Handshake(
        sync.epoch, slave.identity.store_id, "node-b", "", end, settings.store.segment_bytes
    )
    answer = Answer()
    leadership.replication_server.request(
        Kind.HANDSHAKE, encode_handshake(asked), 1_000, answer.on_result
    )
    assert answer.body is not None
    assert sync.received_position(slave.identity.store_id) <= end
