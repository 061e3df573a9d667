"""A replica whose tables are not the master's: who rebuilds its store, when, and who never does.

A difference is planted into the tables of one broker; the next snapshot shows it.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from ha.node_rig import CONTROLLER, Node, Rig
from ha.test_node import others, sent

from popmq.broker.ha.role import BrokerRole
from popmq.broker.node.slave_role import COPY_AGAIN_MS
from popmq.broker.persistence.snapshot import read_snapshot
from popmq.common.errors import PopmqError
from popmq.common.protocol.messaging_payloads import Kind, OnReply, Port
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.common.settings.settings import StoreSettings
from popmq.common.wire import controller_pb2 as pb
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.harness.core_broker import SMALL, Answer

SETTINGS = replace(SMALL, store=StoreSettings(segment_bytes=1 << 20, snapshot_bytes=64 << 10))
BODY = bytes(10_000)
TRY_AGAIN_MS = 3_000  # a send that a proxy repeats at the next master


class OlderController:
    """A controller that knows of no rebuilds: what newer ones add is not in its answers."""

    def __init__(self, under: Port) -> None:
        self._under = under

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        def older(reply: bytes | PopmqError) -> None:
            if kind is Kind.REGISTER and not isinstance(reply, PopmqError):
                decoded_reply = pb.RegisterReply.FromString(reply)
                decoded_reply.grants_rebuilds, decoded_reply.rebuild = False, ""
                reply = decoded_reply.SerializeToString()
            on_reply(reply)

        return self._under.request(kind, _older(kind, body), timeout_ms, older)

    def cancel(self, request_id: int) -> None:
        self._under.cancel(request_id)


def _older(kind: Kind, body: bytes) -> bytes:
    """A heartbeat as an older controller reads it."""
    if kind is not Kind.REGISTER:
        return body
    request = pb.RegisterRequest.FromString(body)
    for name in (
        "tables_equal_at",
        "tables_differ_at",
        "tables_hash",
        "tables_hash_at",
        "asks_rebuild",
    ):
        request.ClearField(name)
    return request.SerializeToString()


class RigOfOlderController(Rig):
    def port_of(self, address: str) -> Port | None:
        port = super().port_of(address)
        return OlderController(port) if port is not None and address == CONTROLLER else port


class RigOfDelayedGrants(Rig):
    """A grant of a controller comes when the record has moved on."""

    def port_of(self, address: str) -> Port | None:
        port = super().port_of(address)
        return DelayedGrants(port) if port is not None and address == CONTROLLER else port


class DelayedGrants:
    def __init__(self, under: Port) -> None:
        self._under = under

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        def delayed(reply: bytes | PopmqError) -> None:
            if kind is Kind.REGISTER and not isinstance(reply, PopmqError):
                decoded_reply = pb.RegisterReply.FromString(reply)
                decoded_reply.state.record.version = max(1, decoded_reply.state.record.version - 1)
                reply = decoded_reply.SerializeToString()
            on_reply(reply)

        return self._under.request(kind, body, timeout_ms, delayed)

    def cancel(self, request_id: int) -> None:
        self._under.cancel(request_id)


class Load:
    """Sends all the time, as a proxy would: one that no master confirmed is sent again."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.acknowledged: list[bytes] = []
        self.refused: list[PopmqError] = []
        self.longest_ms = 0

    def run(self, ms: int) -> None:
        until_ms = self.rig.clock.boot_ms() + ms
        while self.rig.clock.boot_ms() < until_ms:
            self._send(b"%08d" % len(self.acknowledged) + BODY)
            self.rig.advance(50)
            self._look()

    def until(self, what: Callable[[], bool], limit_ms: int = 60_000) -> None:
        until_ms = self.rig.clock.boot_ms() + limit_ms
        while not what():
            assert self.rig.clock.boot_ms() < until_ms, "it never came true"
            self.run(100)

    def _send(self, body: bytes) -> None:
        began_ms = self.rig.clock.boot_ms()
        while True:
            answer = self._ask(body)
            if answer is not None and answer.body is not None:
                break
            waited_ms = self.rig.clock.boot_ms() - began_ms
            assert waited_ms < TRY_AGAIN_MS, "no master takes a send"
            if answer is not None and answer.error is not None and self.rig.masters:
                self.refused.append(answer.error)
            self.rig.advance(10)
        self.acknowledged.append(body)
        self.longest_ms = max(self.longest_ms, self.rig.clock.boot_ms() - began_ms)

    def _ask(self, body: bytes) -> Answer | None:
        if not self.rig.masters:
            return None
        master = self.rig.master
        answer = self.rig.send(body)
        while not answer.heard and master in self.rig.masters:
            self.rig.advance(10)
        return answer

    def _look(self) -> None:
        """At no time are there fewer whole copies than have to be."""
        whole = [item for item in self.rig.nodes if not item.node.identity.copying]
        assert len(whole) >= self.rig.settings.replication.effective_min_in_sync
        for node in self.rig.nodes:
            assert node.node.master_role is None or not node.node.identity.copying, (
                "a leader is wiped"
            )


def started(names: str = "abc", kind: type[Rig] = Rig, *, least: int = 0) -> tuple[Rig, Load]:
    expected = ReplicationSettings(replicas=len(names), min_in_sync=least)
    rig = kind(names, settings=SETTINGS, replication=expected)
    rig.ready()
    rig.make_topic()
    load = Load(rig)
    load.run(1_000)
    return rig, load


def plant(node: Node, offset: int = 5) -> None:
    """Its tables know of a letter that nobody redrove."""
    node.node.broker.deliveries.redriven._add(77, offset)


def planted(node: Node) -> bool:
    return node.node.broker.deliveries.redriven.has(77, 5)


def differs(node: Node) -> bool:
    return node.node.slave_role.tables.differs


def rebuilds(rig: Rig) -> list[int]:
    return [node.node.rebuilds for node in rig.nodes]


def is_in(rig: Rig, node: Node) -> bool:
    return bool(rig.masters) and node.node.identity.store_id in rig._set()


def all_are_in(rig: Rig) -> bool:
    return all(is_in(rig, node) and not differs(node) for node in rig.nodes)


def test_one_wrong_slave_of_three_rebuilds_once_and_sends_never_stop() -> None:
    rig, load = started()
    wrong, right = others(rig)
    before = wrong.node.identity.store_id
    plant(wrong)
    load.until(lambda: wrong.node.rebuilds == 1)
    load.until(lambda: all_are_in(rig))
    load.run(5_000)
    assert wrong.node.identity.store_id != before
    assert (wrong.node.rebuilds, right.node.rebuilds, rig.master.node.rebuilds) == (1, 0, 0)
    assert load.refused == []
    assert load.longest_ms < 1_000
    rig.advance(2_000)
    assert wrong.log() == rig.master.log()
    assert not planted(wrong)
    assert [node.failures for node in rig.nodes] == [[], [], []]


def test_both_snapshots_of_the_differing_position_outlive_the_rebuild() -> None:
    rig, load = started()
    wrong = others(rig)[0]
    plant(wrong)
    load.until(lambda: wrong.node.rebuilds == 1)
    (position,) = wrong.disk.names("data/differing/own")
    assert wrong.disk.names("data/differing/master") == [position]
    own, masters = (
        read_snapshot(wrong.disk, f"data/differing/{origin}/{position}")
        for origin in ("own", "master")
    )
    assert own is not None
    assert masters is not None
    assert own.head.position == masters.head.position == int(position)
    assert own.state_hash != masters.state_hash


def test_a_master_with_wrong_tables_hands_over_and_rebuilds_alone() -> None:
    rig, load = started()
    wrong = rig.master
    stores = {node.name: node.node.identity.store_id for node in others(rig)}
    plant(wrong)
    load.until(lambda: rig.masters not in ([], [wrong]))
    assert rebuilds(rig) == [0, 0, 0]
    load.until(lambda: wrong.node.rebuilds == 1)
    load.until(lambda: all_are_in(rig))
    load.run(5_000)
    assert sum(rebuilds(rig)) == 1
    assert {
        node.name: node.node.identity.store_id for node in rig.nodes if node is not wrong
    } == stores
    assert not any(map(planted, rig.nodes))
    assert [node.failures for node in rig.nodes] == [[], [], []]


def test_a_master_with_wrong_tables_hands_over_though_a_slave_missed_a_comparison() -> None:
    rig, load = started()
    wrong = rig.master
    first, late = others(rig)
    late.housekeeper.held = True
    snapshots = late.node.broker.store.snapshots
    load.until(lambda: 0 < snapshots.wanted_checkpoint <= first.node.slave_role.tables.equal_at)
    plant(wrong)
    load.until(lambda: differs(first))
    late.housekeeper.release()
    load.until(lambda: differs(late))
    positions = {node.node.slave_role.tables.known.differs_at for node in (first, late)}
    assert len(positions) == 2
    load.until(lambda: rig.masters not in ([], [wrong]))
    load.until(lambda: wrong.node.rebuilds == 1)
    load.until(lambda: all_are_in(rig))
    assert not any(map(planted, rig.nodes))


def test_a_power_cut_while_a_rebuild_begins_leaves_a_suspect_store_or_none() -> None:
    rig, load = started()
    wrong = others(rig)[0]
    plant(wrong)
    load.until(lambda: differs(wrong))
    rig.stop_controller()
    for operations in range(1, 100):
        rig.until(lambda: wrong.node.slave_role.rebuild_wish is not None)
        rig.start_controller()
        wrong.disk.cut_at(operations)
        with pytest.raises(PowerCut):
            rig.advance(10_000)
        rig.stop_controller()  # so that the next rebuild does not begin at once
        wrong.kill(power=True)
        wrong.start()
        if wrong.node.identity.copying:
            break
        assert differs(wrong), f"a power cut at operation {operations}: nobody knows any more"
    rig.start_controller()
    load.until(lambda: all_are_in(rig))
    assert not planted(wrong)
    plant(wrong, 6)
    load.until(lambda: differs(wrong))
    load.run(5_000)
    assert wrong.node.slave_role.tables.kept, "it was rebuilt already"


@pytest.mark.more
def test_a_grant_of_an_older_record_counts_for_nothing() -> None:
    rig, load = started(kind=RigOfDelayedGrants)
    wrong = others(rig)[0]
    plant(wrong)
    load.until(lambda: differs(wrong) and not is_in(rig, wrong))
    load.run(10_000)
    assert rebuilds(rig) == [0, 0, 0]
    assert wrong.node.slave_role.rebuild_wish is not None


def test_before_a_controller_answered_no_store_is_rebuilt() -> None:
    rig, _load = started()
    slave = others(rig)[0]
    rig.stop_controller()
    slave.kill()
    slave.start()
    slave.node.slave_role.on_useless_log("its log begins elsewhere")
    assert slave.node.slave_role.allowed_rebuild(slave.node.record) is None


def test_a_copy_that_was_of_no_use_is_begun_again_after_a_pause() -> None:
    rig, _load = started()
    slave = others(rig)[0]
    rig.stop_controller()
    slave.node.identity.renew(copying=True)
    slave.kill()
    slave.start()
    slave.node.slave_role.on_useless_log("its snapshot is damaged")
    rig.advance(COPY_AGAIN_MS - 100)
    assert slave.node.rebuilds == 0
    rig.advance(200)
    assert slave.node.rebuilds == 1


def test_a_master_with_wrong_tables_hands_over_also_where_one_copy_may_confirm() -> None:
    rig, load = started(least=1)
    wrong = rig.master
    plant(wrong)
    load.until(lambda: rig.masters not in ([], [wrong]))
    assert rebuilds(rig) == [0, 0, 0]
    load.until(lambda: wrong.node.rebuilds == 1)
    load.until(lambda: all_are_in(rig))
    assert sum(rebuilds(rig)) == 1


def test_of_two_copies_that_differ_either_can_be_elected() -> None:
    rig, load = started("ab")
    slave = others(rig)[0]
    plant(slave)
    load.until(lambda: differs(slave))
    load.run(1_000)
    rig.master.kill()
    load.until(lambda: rig.masters == [slave])
    assert rebuilds(rig) == [0, 0]


def test_a_silent_slave_that_waits_for_a_comparison_makes_the_master_write_no_snapshots() -> None:
    rig, load = started()
    wrong = others(rig)[0]
    plant(wrong)
    load.until(lambda: differs(wrong))
    leadership = rig.master.node.master_role
    assert leadership is not None
    side = leadership.replication_server
    wrong.kill()
    load.run(rig.settings.replication.laggard_ms)
    side._compared_ms = 0
    load.run(1_000)
    assert not side._compared_ms
    wrong.start()
    load.until(lambda: side._compared_ms > 0)


@pytest.mark.more
def test_of_two_copies_that_differ_neither_is_removed_and_sends_continue() -> None:
    rig, load = started("ab")
    slave = others(rig)[0]
    plant(rig.master)
    load.until(lambda: differs(slave))
    load.run(20_000)
    assert rebuilds(rig) == [0, 0]
    assert is_in(rig, slave), "its log is a complete copy, and the master may be the wrong one"
    assert load.refused == []
    assert slave.end > 0
    assert slave.disk.names("data/differing/own") != []


@pytest.mark.more
def test_without_a_third_opinion_nothing_is_removed_and_sends_continue() -> None:
    rig, load = started()
    wrong, gone = others(rig)
    gone.kill()
    load.until(lambda: len(rig._set()) == 2)
    plant(wrong)
    load.until(lambda: differs(wrong))
    load.run(20_000)
    assert rebuilds(rig) == [0, 0, 0]
    assert is_in(rig, wrong), "min_in_sync needs its copy of the log"
    assert load.refused == []
    gone.start()
    load.until(lambda: wrong.node.rebuilds == 1)
    load.until(lambda: all_are_in(rig))
    assert sum(rebuilds(rig)) == 1


@pytest.mark.more
def test_a_store_that_differs_again_after_its_rebuild_is_kept_and_stays_out() -> None:
    rig, load = started()
    wrong = others(rig)[0]
    plant(wrong)
    load.until(lambda: wrong.node.rebuilds == 1)
    load.until(lambda: wrong.role is BrokerRole.SLAVE and not wrong.node.changing)
    plant(wrong, 6)
    load.until(lambda: differs(wrong))
    store_id = wrong.node.identity.store_id
    load.run(20_000)
    assert wrong.node.slave_role.tables.kept
    assert (wrong.node.rebuilds, wrong.node.identity.store_id) == (1, store_id)
    assert not is_in(rig, wrong)
    assert load.refused == []
    wrong.kill()
    wrong.start()
    load.run(10_000)
    assert wrong.node.rebuilds == 0, "a restart forgets nothing"
    assert not is_in(rig, wrong)


@pytest.mark.more
def test_with_an_older_controller_a_replica_that_differs_keeps_its_store_and_stays_out() -> None:
    rig, load = started(kind=RigOfOlderController)
    wrong = others(rig)[0]
    store_id = wrong.node.identity.store_id
    plant(wrong)
    load.until(lambda: differs(wrong))
    load.until(lambda: not is_in(rig, wrong))
    load.run(10_000)
    assert (wrong.node.rebuilds, wrong.node.identity.store_id) == (0, store_id)
    assert not is_in(rig, wrong)
    assert load.refused == []


@pytest.mark.more
def test_with_an_older_controller_and_a_wrong_master_sends_continue_until_another_leads() -> None:
    rig, load = started(kind=RigOfOlderController)
    wrong = rig.master
    right = others(rig)
    plant(wrong)
    load.until(lambda: all(map(differs, right)))
    load.run(10_000)
    assert rig.master is wrong
    assert rebuilds(rig) == [0, 0, 0]
    assert load.refused == []
    assert len(rig._set()) == 3, "no other member agrees with the master: their logs count"
    # It is replaced, as at an upgrade: the others are equal again without a rebuild.
    wrong.kill()
    load.until(lambda: rig.masters not in ([], [wrong]))
    load.until(lambda: all(is_in(rig, item) and not differs(item) for item in right))
    assert rebuilds(rig) == [0, 0, 0]


def test_a_replica_that_is_named_master_keeps_its_store_though_its_tables_differ() -> None:
    rig, load = started("abc", least=1)
    wrong, gone = others(rig)
    gone.kill()
    load.until(lambda: len(rig._set()) == 2)
    store_id = wrong.node.identity.store_id
    plant(wrong)
    rig.master.kill()
    rig.until(lambda: rig.masters == [wrong])
    load.run(5_000)
    assert (wrong.node.rebuilds, wrong.node.identity.store_id) == (0, store_id)
    assert not differs(wrong)


def test_one_replica_at_a_time_rebuilds() -> None:
    rig, load = started("abcde", least=2)
    wrong = others(rig)[:2]
    for number, node in enumerate(wrong):
        plant(node, 5 + number)

    def busy() -> int:
        return sum(node.node.identity.copying for node in rig.nodes)

    most = 0
    while not all(node.node.rebuilds == 1 for node in wrong):
        load.run(100)
        most = max(most, busy())
    load.until(lambda: all_are_in(rig))
    assert most <= 1
    assert sum(rebuilds(rig)) == 2
    assert load.refused == []


@pytest.mark.more
@pytest.mark.parametrize("seconds", [20])
def test_replicas_under_load_never_differ(seconds: int) -> None:
    rig, load = started()
    load.run(seconds * 1_000)
    sent(rig, b"the last")
    assert rebuilds(rig) == [0, 0, 0]
    assert load.refused == []
    assert not any(map(differs, rig.nodes))
    assert all(item.node.slave_role.tables.equal_at > 0 for item in others(rig))
