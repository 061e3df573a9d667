"""Brokers of a group through their roles: a real controller, real stores, time by hand."""

from dataclasses import replace

import pytest
from ha.node_rig import TOPIC, Node, Rig

from popmq.broker.ha.role import BrokerRole
from popmq.broker.node.broker_process import REPLICA_REST_MS, ReplicaPacing, replication_metrics
from popmq.broker.node.pacing import BUSY_MS, QUIET_MS
from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.common.topics import MessageType, SubscriptionGroup, TopicConfig
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import controller_pb2 as pb
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import Answer, pop


def running(names: str = "abc", *, least: int = 0) -> Rig:
    rig = Rig(names, least=least)
    rig.ready()
    rig.make_topic()
    rig.advance(100)
    return rig


def others(rig: Rig) -> list[Node]:
    return [node for node in rig.nodes if node is not rig.master]


def sent(rig: Rig, *bodies: bytes) -> None:
    for body in bodies:
        answer = rig.send(body)
        rig.until(lambda answer=answer: answer.heard)  # type: ignore[misc]
        assert answer.error is None


def test_a_new_group_elects_its_first_node_and_the_others_follow() -> None:
    rig = running()
    assert [node.role for node in rig.nodes] == [
        BrokerRole.MASTER,
        BrokerRole.SLAVE,
        BrokerRole.SLAVE,
    ]
    assert len({node.node.identity.store_id for node in rig.nodes}) == 3
    assert {node.node.identity.epoch for node in rig.nodes} == {1}


@pytest.mark.more
def test_what_was_acknowledged_survives_its_master() -> None:
    rig = running()
    sent(rig, b"one", b"two", b"three")
    (first,) = [delivery.handle for delivery in rig.receive(limit=1)][:1] or [b""]
    acked = rig.ack(first)
    rig.until(lambda: acked.heard)
    rig.master.kill(power=True)
    rig.ready(members=2)
    assert rig.master.node.identity.epoch == 2
    rig.advance(61_000)
    left = [delivery.head for delivery in rig.receive()]
    assert len(left) == 2
    assert not [node.failures for node in rig.nodes if node.failures]


def test_master_and_slaves_rest_while_nothing_happens_and_not_while_a_role_changes() -> None:
    rig = running()
    rests = {node: ReplicaPacing(node.node, rig.clock) for node in rig.nodes}
    waits = {node: rest.wait_ms() for node, rest in rests.items()}
    assert set(waits.values()) == {BUSY_MS}
    rig.advance(QUIET_MS + 100)
    assert {rest.wait_ms() for rest in rests.values()} == {REPLICA_REST_MS}
    sent(rig, b"one")
    rig.advance(100)
    assert {rest.wait_ms() for rest in rests.values()} == {BUSY_MS}
    rig.advance(QUIET_MS + 100)
    assert {rest.wait_ms() for rest in rests.values()} == {REPLICA_REST_MS}
    first = rig.master
    first.kill()
    rig.ready(members=2)
    rests.pop(first)
    assert {rest.wait_ms() for rest in rests.values()} == {BUSY_MS}
    rig.advance(QUIET_MS + 100)
    assert {rest.wait_ms() for rest in rests.values()} == {REPLICA_REST_MS}


def test_an_older_version_of_the_groups_record_changes_nothing() -> None:
    """Two controllers answer in turn; one of them read the record before the other wrote it."""
    rig = running()
    for node in (rig.ready(3), *others(rig)):
        known = node.node.record
        assert known is not None
        assert len(known.sync_state_set) == 3
        older = GroupRecord(known.leader, known.epoch, (known.leader,), known.version - 1)
        node.node.on_record(older)
        assert node.node.record == known
        side = node.node.slave_role.replication_client
        assert side is None or side.members == set(known.sync_state_set)


def test_a_slave_refuses_clients_and_says_why() -> None:
    rig = running()
    answer = rig.send(b"x", to=others(rig)[0])
    assert answer.error is not None
    assert answer.error.code is Code.NOT_MASTER


def test_a_deposed_master_cuts_what_nobody_else_has_and_follows() -> None:
    rig = running()
    old = rig.master
    sent(rig, b"kept")
    rig.cut(old.name)
    lost = [rig.send(b"lost", to=old) for _ in range(5)]
    rig.until(lambda: rig.master is not old and len(rig.masters) == 2)
    assert not any(answer.heard for answer in lost)
    sent(rig, b"new")
    rig.heal()
    rig.until(lambda: old.role is BrokerRole.SLAVE and old.end == rig.master.end)
    assert old.drops == 1
    assert old.node.slave_role.truncations == 1
    assert old.log() == rig.master.log()
    assert not any(answer.heard for answer in lost)
    rig.until(lambda: len(rig._set()) == 3)


def test_a_master_that_restarts_waits_for_a_new_epoch() -> None:
    rig = running()
    old = rig.master
    sent(rig, b"one")
    old.kill()
    rig.stop_controller()
    old.start()
    rig.advance(3_000)
    assert old.role is BrokerRole.NOBODY
    assert not old.node.gate.clients.is_open
    rig.start_controller()
    rig.ready()
    assert rig.master.node.identity.epoch == 2


def test_confirmed_writes_go_on_without_a_controller() -> None:
    rig = running()
    rig.stop_controller()
    rig.advance(10_000)
    sent(rig, b"one", b"two")
    assert len(rig.receive()) == 2


def test_sends_are_refused_while_too_few_replicas_are_there() -> None:
    rig = running()
    sent(rig, b"one")
    for node in others(rig):
        node.kill()
    rig.advance(4_000)
    answer = rig.send(b"two")
    assert answer.error is not None
    assert answer.error.code is Code.HA_NOT_AVAILABLE
    assert "2 are required (replication.min_in_sync)" in str(answer.error)
    others(rig)[0].start()
    rig.until(lambda: rig.send(b"again").error is None)


def test_the_set_never_gets_smaller_than_min_in_sync() -> None:
    rig = running()
    for node in others(rig):
        node.kill()
    rig.advance(10_000)
    assert len(rig._set()) == 2


def test_a_slave_that_died_is_taken_out_and_comes_back() -> None:
    rig = running()
    gone = others(rig)[0]
    gone.kill(power=True)
    late = rig.send(b"waits")
    rig.until(lambda: late.heard)
    assert late.error is None
    assert len(rig._set()) == 2
    gone.start()
    rig.until(lambda: len(rig._set()) == 3)
    assert gone.log() == rig.master.log()


def test_a_slave_that_lost_its_disk_counts_as_one_slave_that_has_everything_again() -> None:
    rig = running()
    sent(rig, b"one", b"two")
    slave = others(rig)[0]
    slave.kill()
    slave.disk = LyingDisk()
    slave.start()
    rig.advance(2_000)
    rig.ready()
    sent(rig, *(b"x" * 1_000 for _ in range(10)))
    rig.until(lambda: len({node.end for node in rig.nodes}) == 1)
    rig.advance(1_000)
    status = rig.master.node.status()
    assert sorted(slave_status.node for slave_status in status.slaves) == sorted(
        slave_status.name for slave_status in others(rig)
    )
    assert status.lag_bytes == 0
    page = replication_metrics(rig.master.node)
    series = [(metric.name, *metric.labels.values()) for metric in page]
    assert len(set(series)) == len(series)


def test_all_brokers_may_stop_and_start_again() -> None:
    rig = running()
    sent(rig, b"one", b"two")
    for _ in range(2):
        for node in rig.nodes:
            node.kill(power=True)
        for node in rig.nodes:
            node.start()
        rig.ready()
    assert len(rig.receive()) == 2
    assert rig.master.node.identity.epoch == 3


def test_the_second_of_two_masters_confirms_and_the_first_does_not() -> None:
    rig = running()
    old = rig.master
    rig.cut(old.name)
    rig.until(lambda: rig.master is not old)
    late = rig.send(b"late", to=old)
    sent(rig, b"one")
    rig.advance(5_000)
    assert not late.heard or late.error is not None
    assert old.node.broker.store.confirmed < rig.master.node.broker.store.confirmed


# -- timers


def test_a_slave_and_the_controller_know_the_masters_timer_check_point() -> None:
    rig = running()
    rig.advance(4_000)
    master = rig.master.node
    for node in others(rig):
        timers_heard = node.node.slave_role.timers
        assert timers_heard is not None
        assert timers_heard.epoch == master.identity.epoch
        age_ms = rig.clock.boot_ms() - timers_heard.taken_ms
        assert age_ms <= 3_000 + 500
    assert rig.controller is not None
    state = pb.ListReplicasReply.FromString(rig_list(rig)).groups[0]
    assert state.timer_check_point.epoch == master.identity.epoch
    assert state.timer_check_point.age_ms <= 1_000


def rig_list(rig: Rig) -> bytes:
    answer = Answer()
    assert rig.controller is not None
    rig.controller.request(Kind.LIST_REPLICAS, b"", 1_000, answer.on_result)
    assert answer.body is not None
    return answer.body


def test_delayed_messages_fire_once_across_a_change_of_masters() -> None:
    rig = running()
    due_ms = rig.clock.wall_ms() + 5_000
    registry = rig.master.node.broker.registry
    registry.create_topic(TopicConfig(0, "later", 4, MessageType.DELAY))
    rig.settle()
    entries = [
        hop.PutEntry(MessageType.DELAY, b"%d" % number, b"", due_ms=due_ms + 100 * number)
        for number in range(40)
    ]
    put = rig.ask(Kind.PUT, hop.encode_put(hop.PutRequest("later", entries)))
    rig.until(lambda: put.heard)
    rig.advance(6_500)
    rig.master.kill(power=True)
    rig.ready(members=2)
    rig.advance(8_000)
    seen: list[bytes] = []
    while True:
        answer = rig.ask(Kind.POP, pop("later", "g"))
        rig.until(lambda answer=answer: answer.heard)  # type: ignore[misc]
        assert answer.body is not None
        deliveries = hop.decode_pop_reply(answer.body).deliveries
        if not deliveries:
            break
        seen += [delivery.head for delivery in deliveries]
    assert sorted(seen) == sorted(b"%d" % number for number in range(40))
    assert rig.clock.wall_ms() >= due_ms


# -- a broker without replicas


def test_a_broker_alone_needs_no_controller_and_counts_its_own_epochs() -> None:
    rig = Rig("a", replication=ReplicationSettings())
    (alone,) = rig.nodes
    rig.stop_controller()
    rig.advance(20)
    assert alone.role is BrokerRole.MASTER
    assert alone.node.port is alone.node._server
    for epoch in (1, 2, 3):
        assert alone.node.identity.epoch == epoch == alone.node.epochs.last_epoch
        alone.kill(power=epoch == 2)
        alone.start()
        rig.advance(20)


def test_a_broker_alone_becomes_one_of_three_with_all_that_it_has() -> None:
    rig = Rig("a", replication=ReplicationSettings())
    (alone,) = rig.nodes
    rig.advance(20)
    alone.node.broker.registry.create_topic(TopicConfig(0, TOPIC, 4, MessageType.NORMAL))
    alone.node.broker.registry.create_group(SubscriptionGroup(0, "g"))
    rig.advance(20)
    entry = hop.PutEntry(MessageType.NORMAL, b"old", b"")
    put = rig.ask(Kind.PUT, hop.encode_put(hop.PutRequest(TOPIC, [entry])), of=alone)
    rig.advance(20)
    assert put.error is None
    alone.kill()
    rig.settings = replace(rig.settings, replication=ReplicationSettings(replicas=3))
    rig.start_controller()
    alone.start()
    for name in ("node-b", "node-c"):
        rig.nodes.append(Node(rig, name).start())
    rig.ready()
    assert rig.master is alone
    assert [delivery.head for delivery in rig.receive()] == [b"old"]
    assert [node.log() for node in rig.nodes] == [alone.log()] * 3


# -- what must not be forgotten


def test_a_broker_that_crashed_still_refuses_the_orders_of_old_epochs() -> None:
    rig = running()
    first = rig.master.node.record
    assert first is not None
    rig.master.kill()
    rig.ready(members=2)
    slave = next(node for node in rig.nodes if node.alive and node is not rig.master)
    rig.stop_controller()
    slave.kill(power=True)
    slave.start()
    assert slave.node.identity.epoch == 2
    slave.node.on_record(first)
    rig.advance(100)
    assert slave.role is BrokerRole.NOBODY


def test_an_order_is_on_the_disk_before_anything_is_done_about_it() -> None:
    rig = running()
    slave, record = others(rig)[0], rig.master.node.record
    assert record is not None
    rig.stop_controller()
    slave.node.on_record(replace(record, epoch=7, leader="a" * 32, version=9))
    slave.kill(power=True)
    slave.start()
    assert (slave.node.identity.epoch, slave.node.epochs.last_epoch) == (7, 1)


def test_a_slave_named_master_has_everything_on_its_disk_first() -> None:
    rig = running()
    heir = others(rig)[0]
    heir.flusher.held = True
    rig.send(b"x")
    rig.until(lambda: heir.end == rig.master.end > heir.node.broker.store.durable)
    record = rig.master.node.record
    assert record is not None
    rig.stop_controller()
    heir.node.on_record(
        replace(record, epoch=2, leader=heir.node.identity.store_id, version=record.version + 1)
    )
    rig.advance(100)
    assert heir.node.master_role is None
    heir.flusher.release()
    rig.advance(100)
    assert heir.node.master_role is not None
    assert heir.node.epochs.last_epoch == 2


# -- stops and starts


def test_brokers_that_stop_cleanly_begin_where_they_were() -> None:
    rig = running()
    sent(rig, b"one", b"two")
    ends = {}
    for node in [*others(rig), rig.master]:
        node.node.stop()
        rig.settle()
        node.node.close()
        node.alive = False
        rig.connections_lost(node.address)
        ends[node.name] = node.end
        assert not node.disk.exists("data/abort") or node.node.master_role is not None
    for node in rig.nodes:
        node.start()
        assert node.end == ends[node.name]
    rig.ready()
    assert len(rig.receive()) == 2


def test_a_slave_follows_the_address_that_works_whatever_another_controller_says() -> None:
    rig = running()
    slave, master = others(rig)[0], rig.master
    before = slave.node.slave_role.replication_client
    view = slave.node.view
    old = tuple(
        replace(member, address="elsewhere:1") if member.node == master.name else member
        for member in view.members
    )
    slave.node.on_view(replace(view, members=old))
    rig.advance(1_000)
    assert slave.node.slave_role.replication_client is before
    master.kill()
    rig.ready(members=2)


def test_a_request_that_cannot_be_read_is_refused() -> None:
    rig = running()
    answer = rig.ask(Kind.HAND_OVER, b"\xff\xff\xff")
    assert answer.error is not None
    assert answer.error.code is Code.BAD_REQUEST


def test_a_refusal_waits_until_what_it_rests_on_is_confirmed() -> None:
    """A topic that a master without slaves has made is not there for others (rule 8)."""
    rig = running()
    old = rig.master
    rig.cut(old.name)
    create = admin.CreateTopicRequest(topic=admin.Topic(name="later")).SerializeToString()
    answer = rig.ask(Kind.CREATE_TOPIC, create, of=old)
    again = rig.ask(Kind.CREATE_TOPIC, create, of=old)
    unknown = rig.ask(Kind.POP, pop("nowhere", "g", limit=1, invisible_ms=1_000), of=old)
    timers = admin.ListTimersRequest(topic="nowhere").SerializeToString()
    in_steps = rig.ask(Kind.LIST_TIMERS, timers, of=old)
    rig.until(lambda: rig.master is not old and len(rig.masters) == 2)
    assert not answer.heard
    assert not again.heard
    assert not unknown.heard
    assert not in_steps.heard
    rig.heal()
    rig.until(lambda: old.role is BrokerRole.SLAVE and old.end == rig.master.end)
    assert again.error is None or again.error.code is not Code.BAD_REQUEST
    settled = rig.ask(Kind.CREATE_TOPIC, create)
    rig.until(lambda: settled.heard)
    refused = rig.ask(Kind.CREATE_TOPIC, create)
    assert refused.error is not None
    assert refused.error.code is Code.BAD_REQUEST
