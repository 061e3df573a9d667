"""Half messages at the end of a segment of the log, and where there is no room for another."""

from dataclasses import replace

import pytest
from transaction.rig import begin, broker, end, received, restart

from popmq.common import topics
from popmq.common.record.message import HEADER_SIZE
from popmq.common.record.transaction_token import TransactionEnd
from popmq.common.settings.settings import MessageSettings, StoreSettings
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import SMALL

SEGMENT = 64 << 10
SHORT = replace(
    SMALL,
    store=StoreSettings(segment_bytes=SEGMENT, snapshot_bytes=32 << 10),
    message=MessageSettings(max_body_bytes=32 << 10),
)


@pytest.mark.parametrize("left", [0, 1, HEADER_SIZE - 1, HEADER_SIZE])
@pytest.mark.parametrize("clean", [True, False], ids=["clean stop", "crash"])
def test_one_whose_record_is_a_segments_last_is_committed(left: int, clean: bool) -> None:
    """The next record begins in the next segment, also where less than a header is left."""
    core = broker(SHORT)
    core.topic("noise", queues=1)
    pending = core.broker.transactions.table.pending
    first = begin(core, "a")
    size = pending[0].unit.size
    core.send("noise", bytes(30_000))
    before = core.broker.store.end
    core.send("noise", bytes(1_000))
    noise = core.broker.store.end - before - 1_000
    core.send("noise", bytes(SEGMENT - left - size - core.broker.store.end - noise))
    last = begin(core, "b")
    unit = pending[1].unit
    assert (unit.position + unit.size, unit.size) == (SEGMENT - left, size)
    assert end(core, "b", last.message) is None
    restart(core, clean=clean)
    assert end(core, "a", first.message) is None
    assert received(core) == ["a", "b"]


def test_one_that_cannot_be_given_up_on_a_full_disk_waits_and_is_no_work() -> None:
    disk = LyingDisk()
    core = broker(SHORT, disk=disk, max_checks=1, check_interval_ms=1_000)
    begin(core, "a")
    transactions, store = core.broker.transactions, core.broker.store
    half = transactions.table.pending[0]
    transactions.halves.write_op(half, TransactionEnd.CHECKED, 1)
    disk.capacity -= disk.space("")[0] - 1_000  # no room for a segment
    while store.guard.copies_allowed:  # another's records take the room, before it is due
        for _ in range(100):
            transactions.halves.write_op(half._replace(offset=1_000), TransactionEnd.CHECKED, 1)
        core.clock.advance(10)
        core.broker.step()
        core.run_until_idle()
    core.clock.advance(1_000)
    done = []
    for _ in range(50):
        done.append(core.broker.step())
        core.run_until_idle()
    assert len(transactions.table.pending) == 1
    assert done[-1] == 0
    disk.capacity = 1 << 50
    core.advance(5_000)
    assert received(core, topics.TRANSACTION_DLQ_TOPIC) == ["a"]
