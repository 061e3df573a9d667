"""A slave that begins with nothing, or with the wrong thing: it copies snapshot and log (R9)."""

from dataclasses import replace

import pytest
from ha.node_rig import Node, Rig
from ha.test_node import others, running, sent

from popmq.broker.ha.role import BrokerRole
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.common.settings.settings import StoreSettings
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import SMALL

SHORT = replace(
    SMALL,
    store=StoreSettings(
        segment_bytes=1 << 20, snapshot_bytes=128 << 10, retention_bytes=2 << 20, retention_hours=1
    ),
)
BODY = bytes(60_000)


def rig_without_its_first_segments(*, catch_up: int = 0) -> Rig:
    """The master's log does not begin at 0 any more."""
    expected = ReplicationSettings(
        replicas=3, fetch_bytes=64 << 10, catch_up_bytes_per_second=catch_up
    )
    rig = Rig(settings=SHORT, replication=expected)
    rig.ready()
    rig.make_topic()
    fill(rig)
    return rig


def fill(rig: Rig) -> None:
    """Until the log begins one segment later than now."""
    store = rig.master.node.broker.store
    before, number = store.start, 0
    while store.start == before:
        number += 1
        sent(rig, b"%d" % number + BODY)
        rig.advance(200)
        assert number < 200


def is_in(rig: Rig, node: Node) -> bool:
    return node.node.identity.store_id in rig._set()


def same_bytes(node: Node, other: Node) -> bool:
    """Of what both have."""
    first = max(node.node.broker.store.start, other.node.broker.store.start)
    logs = [node.log()[first - node.node.broker.store.start :] for node in (node, other)]
    return logs[0] == logs[1] != b""


@pytest.mark.more
def test_a_slave_whose_disk_was_wiped_copies_everything_and_can_lead() -> None:
    rig = rig_without_its_first_segments(catch_up=1_000_000)
    gone = others(rig)[0]
    before = gone.node.identity.store_id
    gone.kill()
    gone.disk = LyingDisk()
    gone.start()
    rig.until(lambda: gone.role is BrokerRole.COPYING)
    sent(rig, b"meanwhile")
    rig.until(lambda: gone.role is BrokerRole.SLAVE and is_in(rig, gone))
    assert gone.node.identity.store_id != before
    rig.until(lambda: gone.end == rig.master.end)
    assert same_bytes(gone, rig.master)
    # It has the tables, too: both others go, and it serves what is left.
    sent(rig, b"after")
    unread = {delivery.head for delivery in rig.receive(limit=32)}
    for node in rig.nodes:
        if node is not gone:
            node.kill()
    other = next(node for node in rig.nodes if node is not gone)
    other.start()
    rig.until(lambda: rig.masters == [gone] or rig.masters == [other])
    rig.advance(61_000)
    seen = set()
    while batch := rig.receive():
        seen |= {delivery.head for delivery in batch}
        acked = rig.ack(*(delivery.handle for delivery in batch))
        rig.until(lambda acked=acked: acked.heard)  # type: ignore[misc]
    assert unread <= seen
    assert {b"meanwhile", b"after"} <= seen
    assert not [node.failures for node in rig.nodes if node.failures]


@pytest.mark.more
def test_a_slave_so_far_behind_that_the_log_is_gone_begins_anew() -> None:
    rig = rig_without_its_first_segments()
    behind = others(rig)[0]
    before = behind.node.identity.store_id
    behind.kill()
    for _ in range(4):
        fill(rig)
    behind.start()
    rig.until(lambda: is_in(rig, behind))
    assert behind.node.rebuilds == 1
    assert behind.node.identity.store_id != before
    rig.until(lambda: behind.end == rig.master.end)
    assert same_bytes(behind, rig.master)


def test_a_slave_not_so_far_behind_gets_what_it_lacks() -> None:
    rig = running()
    behind = others(rig)[0]
    before = behind.node.identity.store_id
    behind.kill()
    for number in range(30):
        sent(rig, b"%d" % number + BODY)
    behind.start()
    rig.until(lambda: is_in(rig, behind))
    assert (behind.node.rebuilds, behind.node.identity.store_id) == (0, before)
    assert behind.log() == rig.master.log()


def test_a_copy_that_was_interrupted_is_worth_nothing_and_begins_again() -> None:
    rig = rig_without_its_first_segments(catch_up=400_000)
    gone = others(rig)[0]
    gone.kill()
    gone.disk = LyingDisk()
    gone.start()
    rig.until(
        lambda: gone.role is BrokerRole.COPYING and gone.end > rig.master.node.broker.store.start
    )
    half = gone.node.identity.store_id
    assert not is_in(rig, gone)
    gone.kill(power=True)
    gone.start()
    assert gone.node.identity.store_id != half
    assert gone.end == 0
    rig.until(lambda: is_in(rig, gone), limit_ms=120_000)
    rig.until(lambda: gone.end == rig.master.end)
    assert same_bytes(gone, rig.master)


def test_what_is_being_copied_is_not_acknowledged() -> None:
    rig = rig_without_its_first_segments(catch_up=400_000)
    gone = others(rig)[0]
    gone.kill()
    gone.disk = LyingDisk()
    gone.start()
    leadership = rig.master.node.master_role
    assert leadership is not None
    looked = 0
    while not is_in(rig, gone):
        rig.advance(10)
        if gone.node.identity.copying:
            follower = leadership.replication_server.followers.get(gone.node.identity.store_id)
            assert follower is None or follower.acked == 0
            looked += 1
    assert looked > 100


def test_a_copy_goes_on_where_it_was_when_the_connection_breaks() -> None:
    rig = rig_without_its_first_segments(catch_up=400_000)
    gone = others(rig)[0]
    gone.kill()
    gone.disk = LyingDisk()
    gone.start()
    rig.until(
        lambda: gone.role is BrokerRole.COPYING and gone.end > rig.master.node.broker.store.start
    )
    store_id, end = gone.node.identity.store_id, gone.end
    rig.cut(gone.name)
    rig.advance(3_500)
    rig.heal()
    rig.until(lambda: is_in(rig, gone), limit_ms=120_000)
    assert gone.node.identity.store_id == store_id
    assert gone.end > end
    rig.until(lambda: gone.end == rig.master.end)
    assert same_bytes(gone, rig.master)


def test_masters_and_slaves_compare_their_tables_all_the_time() -> None:
    rig = rig_without_its_first_segments()
    for node in others(rig):
        slave = node.node.broker.store.slave
        assert slave is not None
        assert slave.hashes.compared > 3
        assert slave.hashes.diverged == 0
