"""A crash at every operation of either side's disk, from the drain to its end: each timer fires
once, whatever of the last writes was lost."""

import pytest
from timer.move_rig import LOSSES, MoveRig, PowerCut, send_ids
from timer.timer_client import HOUR, recall

from popmq.common.protocol.messaging_payloads import RecallResult
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.sim_disk import SimDisk

IDS = [f"T{number}" for number in range(8)]


def crashed_move(client: str, operations: int, loss: Loss) -> tuple[MoveRig, bool]:
    """Two batches; the power of one side goes at that operation, if it comes to that."""
    rig = MoveRig("a", "b", seed=operations, moves_per_second=4)
    send_ids(rig["a"], IDS, HOUR)
    disk = rig[client].disk
    assert isinstance(disk, SimDisk)
    disk.faults.cut_at(operations)
    crashed = False
    try:
        rig["a"].drain()
        _move(rig)
        rig[client].stop()  # it writes a snapshot
        disk.faults.heal()
    except PowerCut:
        crashed = True
        rig[client].crash(loss)
    else:
        rig[client].start()
    if not rig["a"].broker.registry.draining:
        rig["a"].drain()
    _move(rig)
    return rig, crashed


def _move(rig: MoveRig) -> None:
    for _ in range(400):
        rig.clock.advance(100)
        rig.step()
        if not rig["a"].pending and not rig["a"].broker.timers.outgoing_timers.is_under_way:
            return
    raise AssertionError(f"still there: {rig['a'].drain(look=True)}")


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(loss, marks=[] if loss is Loss.SCATTERED else [pytest.mark.more])
        for loss in LOSSES
    ],
)
@pytest.mark.parametrize("crashed_side", ["a", "b"])
def test_a_crash_at_every_operation_loses_no_timer_and_doubles_none(
    crashed_side: str, loss: Loss
) -> None:
    operations, crashed = 0, True
    while crashed:
        rig, crashed = crashed_move(crashed_side, operations, loss)
        assert rig["b"].pending == len(IDS), operations
        assert recall(rig["b"], IDS[operations % len(IDS)]) is RecallResult.DONE
        rig.run(2 * HOUR, parts=6)
        left = sorted(item for item in IDS if item != IDS[operations % len(IDS)])
        assert rig.fired() == left, operations
        operations += 1
    assert operations > 15
