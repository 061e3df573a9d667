"""The doctor knows the records of transactions and what stands for them in the queues."""

from dataclasses import replace
from pathlib import Path

import pytest
from transaction.rig import begin, broker, end, wait

from popmq.broker.doctor.finding import RequiredAction
from popmq.cli.local.doctor import examine
from popmq.testing.disk.lying_disk import ResidentDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker


@pytest.fixture
def store(tmp_path: Path) -> Path:
    base = replace(SMALL, broker=replace(SMALL.broker, data=str(tmp_path / "data")))
    new_broker = broker(base, disk=ResidentDisk())
    for number in range(5):
        half = begin(new_broker, f"m-{number}")
        if number < 3:
            end(new_broker, f"m-{number}", half.message, commit=number > 0)
    proxy = wait(new_broker)
    new_broker.advance(6_000)
    assert proxy.body
    new_broker.broker.release_files()
    return tmp_path / "data"


def findings(folder: Path) -> list[str]:
    found_findings = examine(str(folder), segment_bytes=SMALL.store.segment_bytes).findings
    return [
        str(found_finding)
        for found_finding in found_findings
        if found_finding.need is not RequiredAction.NOTHING
    ]


def test_a_store_with_transactions_is_whole(store: Path) -> None:
    assert findings(store) == []


def test_units_that_an_op_queue_lacks_are_missed_and_made_again_by_a_start(store: Path) -> None:
    (units,) = store.glob("consumequeue/RMQ_SYS_TRANS_OP_HALF_TOPIC@6/0/*")
    units.unlink()
    base = replace(SMALL, broker=replace(SMALL.broker, data=str(store)))
    again = CoreBroker(disk=ResidentDisk(), settings=base)
    assert again.broker.store.queue(6, 0).count == 3  # a rollback, two checks
    again.stop()
    assert findings(store) == []
