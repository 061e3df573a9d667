"""What the simulator found in retention, each in its smallest form."""

import random
from contextlib import suppress
from dataclasses import replace

import pytest

from popmq.common.settings.settings import StoreSettings
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.disk.sim_disk import SimDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker

HOUR_MS = 3_600_000
BODY = bytes(50_000)
SHORT = replace(
    SMALL,
    store=StoreSettings(segment_bytes=1 << 20, snapshot_bytes=64 << 10, retention_hours=1),
)


def until_moved(core: CoreBroker) -> None:
    """Send what nobody reads until retention moved a body; that record is the log's last."""
    core.topic("noise", queues=1)
    for _ in range(400):
        core.send("noise", BODY)
        core.clock.advance(60_000)
        core.run_steps()
        if core.broker.store.retention.relocated:
            return
    raise AssertionError("nothing was moved")


def test_a_moved_body_stays_for_the_other_group_that_holds_it() -> None:
    core = CoreBroker(settings=SHORT)
    core.topic("orders", queues=1)
    core.send("orders", b"one")
    (mine,) = core.receive("orders", "g", invisible_ms=12 * HOUR_MS)
    core.receive("orders", "h", invisible_ms=12 * HOUR_MS)
    until_moved(core)
    core.ack("orders", "g", mine.handle)
    core.clock.advance(12 * HOUR_MS)
    core.run_steps()
    assert [delivery.head for delivery in core.receive("orders", "h")] == [b"one"]


def test_where_a_body_went_is_forgotten_by_the_next_round_when_no_group_holds_it() -> None:
    core = CoreBroker(settings=SHORT)
    core.topic("orders", queues=1)
    core.send("orders", b"one")
    (held,) = core.receive("orders", "g", invisible_ms=12 * HOUR_MS)
    until_moved(core)
    assert core.broker.table.moved.items()
    core.ack("orders", "g", held.handle)
    retention = core.broker.store.retention
    rounds_later = retention.deleted_segments + 2
    for _ in range(400):
        if retention.deleted_segments >= rounds_later:
            break
        core.send("noise", BODY)
        core.clock.advance(60_000)
        core.run_steps()
    assert not core.broker.table.moved.items()


def test_a_start_right_behind_a_moved_body_moves_log_time_by_nothing() -> None:
    core = CoreBroker(settings=SHORT)
    core.topic("orders", queues=1)
    core.send("orders", b"one")
    core.receive("orders", "g", invisible_ms=12 * HOUR_MS)
    until_moved(core)
    before = core.broker.store.log_ms()
    core.broker.release_files()
    core.start()
    assert core.broker.store.log_ms() == before


@pytest.mark.more
def test_a_crash_while_a_removed_index_is_rebuilt_hides_no_message() -> None:
    for seed in range(200):
        disk = SimDisk(random.Random(seed))
        disk.losses.sector_bytes = 64
        core = CoreBroker(disk=disk, settings=replace(SMALL, store=SHORT.store))
        core.topic("orders", queues=1)
        for _ in range(60):
            core.send("orders", b"body")
        core.stop()
        for folder in ("consumequeue", "system"):
            disk.lose_folder(f"{SMALL.broker.data}/{folder}")
        disk.crash(Loss.NOTHING)
        core.start()
        core.send("orders", b"body")
        disk.faults.cut_at(seed % 20)
        with suppress(PowerCut):
            core.clock.advance(11_000)
            core.run_steps()
        disk.crash(Loss.SCATTERED)
        core.start()
        result = 0
        while batch := core.receive("orders", "g"):
            result += len(batch)
        assert result == 61


def test_a_body_that_is_due_while_retention_moves_it_comes_back() -> None:
    """It was read at its new place before that was written, and given up as lost."""
    core = CoreBroker(settings=SHORT)
    core.topic("orders", queues=1)
    core.topic("noise", queues=1)
    core.send("orders", b"one")
    core.receive("orders", "g", invisible_ms=12 * HOUR_MS)
    retention = core.broker.store.retention
    for _ in range(400):
        core.send("noise", BODY)
        core.clock.advance(60_000)
        while core.broker.step() and not retention.relocated:
            core.run_until_idle()
        if retention.relocated:
            break
        core.run_until_idle()
    core.clock.advance(12 * HOUR_MS)
    core.broker.step()  # due, and nothing was flushed since the move
    core.run_steps()
    core.clock.advance(1_000)
    core.run_steps()
    assert [delivery.head for delivery in core.receive("orders", "g")] == [b"one"]
