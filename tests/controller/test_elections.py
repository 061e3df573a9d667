"""Who leads a broker group: the rules R1 to R5 of replication, one behaviour each."""

import pytest
from controller.controller_rig import (
    DEAD_MS,
    GROUP,
    HEARTBEAT_MS,
    Broker,
    Rig,
    alter,
    members,
    running,
    three,
)

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.wire import controller_pb2 as pb
from popmq.controller.metadata_store import (
    MemoryStore,
    OnRead,
    OnSwapped,
    WriteOutcome,
    WriteResult,
)

# -- the first record


def test_a_new_group_is_led_by_its_first_node_and_all_are_in_the_set() -> None:
    rig = Rig(*three())
    rig.run(2 * HEARTBEAT_MS)
    assert rig.record == GroupRecord("store-node-a", 1, tuple(f"store-node-{c}" for c in "abc"), 1)
    assert [broker.role for broker in rig.brokers] == [pb.MASTER, pb.SLAVE, pb.SLAVE]


def test_a_new_group_waits_for_all_its_brokers() -> None:
    rig = Rig(*three())
    rig.broker("node-c").up = False
    rig.run(10 * DEAD_MS)
    assert rig.record is None
    assert "2 of 3 brokers are heard" in rig.state.trouble
    rig.broker("node-c").up = True
    rig.run(HEARTBEAT_MS)
    assert rig.leader == "node-a"


def test_the_only_store_with_messages_leads_a_group_without_a_record() -> None:
    rig = Rig(*three())
    single = rig.broker("node-b")
    single.epoch, single.end = 7, 4_096
    rig.run(2 * HEARTBEAT_MS)
    assert rig.record == GroupRecord("store-node-b", 8, ("store-node-b",), 1)


def test_of_several_stores_with_messages_and_no_record_nobody_leads() -> None:
    rig = Rig(*three(epoch=3, end=100, role=pb.NOBODY))
    rig.run(5 * DEAD_MS)
    assert rig.record is None
    assert "3 brokers have data: node-a (epoch 3, 100 bytes)" in rig.state.trouble


# -- R1: compare-and-set


class SlowStore(MemoryStore):
    """Writes, and then does not say so; reads old records when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = 0  # so many writes go unanswered
        self.stale: GroupRecord | None = None
        self.swaps: list[tuple[int, GroupRecord]] = []

    def read(self, key: str, then: OnRead) -> None:
        if self.stale is not None:
            then(self.stale)
            return
        super().read(key, then)

    def swap(self, key: str, expected_version: int, record: GroupRecord, then: OnSwapped) -> None:
        if key != GROUP:  # that of the cluster's owner
            super().swap(key, expected_version, record, then)
            return
        self.swaps.append((expected_version, record))
        results: list[WriteResult] = []
        super().swap(key, expected_version, record, results.append)
        if self.silent:
            self.silent -= 1
            then(WriteResult(WriteOutcome.UNKNOWN, None, "no answer in time"))
            return
        then(results[0])


def test_an_election_whose_answer_is_lost_is_read_again_and_not_repeated() -> None:
    store = SlowStore()
    rig = running(store=store)
    store.silent = 1
    rig.broker("node-a").up = False
    rig.run(3 * DEAD_MS)
    assert rig.record == GroupRecord("store-node-b", 2, ("store-node-b", "store-node-c"), 2)
    assert rig.known == rig.record
    assert len(store.swaps) == 2


def test_an_election_from_an_old_record_writes_nothing() -> None:
    store = SlowStore()
    rig = running(store=store)
    first = rig.record
    assert first is not None
    alter(rig.controllers[0], first, "node-a", "node-b")
    rig.controllers[:] = [rig.controller()]
    store.stale = first
    rig.broker("node-c").end = 1 << 40  # it would be the best of the old set
    rig.broker("node-a").up = False
    rig.run(3 * DEAD_MS)
    store.stale = None
    assert "store-node-c" in [expected.leader for _, expected in store.swaps]
    assert rig.record == GroupRecord("store-node-b", 2, ("store-node-a", "store-node-b"), 3)


def test_two_controllers_that_elect_at_once_make_one_epoch() -> None:
    rig = running(controllers=2)
    rig.broker("node-a").up = False
    rig.run(2 * DEAD_MS)
    assert rig.record == GroupRecord("store-node-b", 2, ("store-node-b", "store-node-c"), 2)
    assert [controller.groups[GROUP].record for controller in rig.controllers] == [rig.record] * 2
    assert (
        sum(controller.groups[GROUP].elections for controller in rig.controllers) == 2
    )  # the first, and this


def test_a_controller_takes_the_record_that_another_one_wrote() -> None:
    rig = running(controllers=2)
    first = rig.record
    assert first is not None
    alter(rig.controllers[1], first, "node-a", "node-c")
    rig.run(2 * DEAD_MS)
    assert members(rig.known) == ["node-a", "node-c"]


# -- R2: whom


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "node-b"),
        ({"node-c": {"end": 10}}, "node-c"),
        ({"node-b": {"end": 99, "epoch": 0}}, "node-c"),
        ({"node-c": {"priority": -1}}, "node-c"),
        ({"node-b": {"end": 5}, "node-c": {"priority": -1}}, "node-b"),
    ],
    ids=["by name", "by position", "by epoch before position", "by priority", "position first"],
)
def test_the_member_that_loses_least_is_elected(
    changes: dict[str, dict[str, int]], wanted: str
) -> None:
    rig = running()
    fresh = rig.controllers[0] = rig.controller()  # an accepted epoch never goes back
    for node, fields in changes.items():
        for name, value in fields.items():
            setattr(rig.broker(node), name, value)
    for broker in rig.brokers:
        broker.obeys = False
    rig.broker("node-a").up = False
    rig.run(3 * DEAD_MS)
    assert rig.leader == wanted
    assert rig.record is not None
    assert rig.record.epoch == 2
    assert fresh.groups[GROUP].elections == 1


def test_a_master_that_is_heard_stays() -> None:
    rig = running()
    before = rig.record
    rig.broker("node-b").end = 1 << 40
    rig.run(20 * DEAD_MS)
    assert rig.record == before


def test_a_master_that_restarted_gets_a_new_epoch_before_it_serves() -> None:
    rig = running()
    rig.broker("node-a").role = pb.NOBODY
    rig.broker("node-a").end = 50
    rig.run(2 * DEAD_MS)
    assert rig.record is not None
    assert (rig.leader, rig.record.epoch) == ("node-a", 2)
    assert rig.broker("node-a").role == pb.MASTER


def test_a_slave_that_was_idle_for_long_may_take_its_time_to_open_as_master() -> None:
    rig = running()
    rig.run(10 * DEAD_MS)
    rig.broker("node-a").up = False
    node_b = rig.broker("node-b")
    node_b.obeys = False
    rig.run(DEAD_MS + 2 * HEARTBEAT_MS)
    assert rig.leader == "node-b"
    node_b.epoch = 2  # accepted, and not open yet: it still says that it is a slave
    rig.beat()
    rig.step()
    assert rig.record is not None
    assert rig.record.epoch == 2


def test_a_member_that_does_not_take_its_order_is_passed_over() -> None:
    rig = running()
    rig.broker("node-b").obeys = False
    rig.broker("node-a").up = False
    rig.run(DEAD_MS + 2 * HEARTBEAT_MS)
    assert rig.leader == "node-b"
    rig.run(4 * DEAD_MS)
    assert rig.leader == "node-c"


# -- R3: the set of the next epoch


@pytest.mark.parametrize(
    ("min_in_sync", "dead", "kept"),
    [
        (1, "node-a", ["node-b", "node-c"]),
        (2, "node-a", ["node-b", "node-c"]),
        (1, "node-a node-b", ["node-c"]),
        (2, "node-a node-b", ["node-a", "node-c"]),
        (3, "node-a node-b", ["node-a", "node-b", "node-c"]),
    ],
)
def test_the_dead_leave_the_set_unless_it_would_be_too_small(
    min_in_sync: int, dead: str, kept: list[str]
) -> None:
    rig = running(min_in_sync=min_in_sync)
    for node in dead.split():
        rig.broker(node).up = False
    rig.run(3 * DEAD_MS)
    assert members(rig.record) == kept
    assert rig.leader == next(item for item in kept if item not in dead)


def test_an_election_adds_nobody_to_the_set() -> None:
    rig = running()
    first = rig.record
    assert first is not None
    alter(rig.controllers[0], first, "node-a", "node-b")
    rig.broker("node-c").end = 1 << 40
    rig.broker("node-a").up = False
    rig.run(3 * DEAD_MS)
    assert rig.leader == "node-b"
    assert "node-c" not in members(rig.record)


# -- R4: the master's own requests


def test_the_set_changes_by_the_masters_request() -> None:
    rig = running()
    first = rig.record
    assert first is not None
    reply = alter(rig.controllers[0], first, "node-a", "node-c")
    assert reply.outcome == pb.AlterSyncStateSetReply.WRITTEN
    assert rig.record == GroupRecord("store-node-a", 1, ("store-node-a", "store-node-c"), 2)
    assert reply.record.version == 2


def test_a_request_with_an_old_version_is_refused_and_the_version_is_not_refreshed() -> None:
    rig = running()
    first = rig.record
    assert first is not None
    alter(rig.controllers[0], first, "node-a", "node-b")
    now = rig.record
    reply = alter(rig.controllers[0], first, "node-a", "node-c")
    assert reply.outcome == pb.AlterSyncStateSetReply.REFUSED
    assert reply.record.version == 2
    assert rig.record == now


def test_a_request_of_a_master_of_the_past_writes_nothing() -> None:
    rig = running()
    old = rig.record
    assert old is not None
    rig.broker("node-a").up = False
    rig.run(2 * DEAD_MS)
    now = rig.record
    assert alter(rig.controllers[0], old, "node-a").outcome == pb.AlterSyncStateSetReply.REFUSED
    assert now is not None
    stolen = GroupRecord("store-node-a", 1, ("store-node-a",), now.version)
    with pytest.raises(PopmqError, match="node-a is not the master of epoch 1") as caught:
        alter(rig.controllers[0], stolen, "node-a")
    assert caught.value.code is Code.PRECONDITION_FAILED
    assert rig.record == now


def test_a_request_whose_write_is_not_answered_is_told_that_nobody_knows() -> None:
    store = SlowStore()
    rig = running(store=store)
    first = rig.record
    assert first is not None
    store.silent = 1
    reply = alter(rig.controllers[0], first, "node-a", "node-b")
    assert reply.outcome == pb.AlterSyncStateSetReply.UNKNOWN
    assert not reply.HasField("record")
    rig.run(HEARTBEAT_MS)
    assert members(rig.known) == ["node-a", "node-b"]  # it had been written


def test_a_request_works_at_a_controller_that_has_read_nothing_yet() -> None:
    rig = running()
    first = rig.record
    assert first is not None
    reply = alter(rig.controller(), first, "node-a", "node-b")
    assert reply.outcome == pb.AlterSyncStateSetReply.WRITTEN


@pytest.mark.parametrize("nodes", [(), ("node-b",)], ids=["nobody", "without the leader"])
def test_a_set_without_its_leader_is_refused(nodes: tuple[str, ...]) -> None:
    rig = running()
    first = rig.record
    assert first is not None
    with pytest.raises(PopmqError, match="needs its leader") as caught:
        alter(rig.controllers[0], first, *nodes)
    assert caught.value.code is Code.BAD_REQUEST
    assert rig.record == first


# -- R5: nobody of the set is alive


def test_the_record_stays_while_no_member_is_heard_and_any_one_makes_the_group_whole() -> None:
    rig = running()
    first = rig.record
    assert first is not None
    alter(rig.controllers[0], first, "node-a", "node-b")
    kept = rig.record
    rig.broker("node-a").up = rig.broker("node-b").up = False
    rig.run(20 * DEAD_MS)
    assert rig.record == kept
    assert "no member of the SyncStateSet (node-a, node-b) sends heartbeats" in rig.state.trouble
    rig.broker("node-b").up = True
    rig.run(2 * HEARTBEAT_MS)
    assert rig.leader == "node-b"
    assert rig.state.trouble == ""


def test_a_member_that_comes_back_with_a_new_disk_is_in_no_set() -> None:
    rig = running()
    for broker in rig.brokers:
        broker.up = False
    rig.run(2 * DEAD_MS)
    for broker in rig.brokers:
        broker.up, broker.epoch, broker.end, broker.role = True, 0, 0, pb.NOBODY
        broker.store_id = f"new-{broker.node}"
    kept = rig.record
    rig.run(5 * DEAD_MS)
    assert rig.record == kept
    assert "no member of the SyncStateSet" in rig.state.trouble


def test_a_broker_alone_in_its_group_can_lead_again() -> None:
    rig = Rig(Broker("node-a", replicas=2, min_in_sync=1), Broker("node-b", replicas=2))
    rig.run(2 * HEARTBEAT_MS)
    rig.broker("node-b").up = False
    first = rig.record
    assert first is not None
    alter(rig.controllers[0], first, "node-a")
    rig.broker("node-a").role = pb.NOBODY
    rig.run(2 * DEAD_MS)
    assert rig.record == GroupRecord("store-node-a", 2, ("store-node-a",), 3)
