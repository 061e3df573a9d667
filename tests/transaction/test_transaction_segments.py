"""Half messages at the end of a segment of the log."""

from dataclasses import replace

import pytest
from transaction.rig import begin, broker, end, received, restart

from popmq.common.config import MessageSettings, StoreSettings
from popmq.common.message import HEADER_SIZE
from popmq.testing.core import SMALL

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
