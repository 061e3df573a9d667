"""The doctor against real stores: for each damage what it says, what its repair does, and that a
broker then delivers every message the doctor called kept (docs/concepts/doctor.md)."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from broker.damages import (
    checkpoint_between_records,
    damaged_snapshot,
    doubled_unit,
    file_ends_in_a_header,
    flip,
    flip_first_message,
    flip_last_but_three,
    foreign_file,
    garbage_behind_the_end,
    garbled_checkpoint,
    log_end,
    no_checkpoint,
    no_index_at_all,
    nothing,
    odd_file_in_a_queue,
    padding_size,
    queue_of_a_stranger,
    remove_first_segment,
    remove_middle_segment,
    shortened_units,
    torn_tail,
    unit_of_its_neighbour,
    units_file,
    units_of_another_queue,
    wrong_revive_unit,
    wrong_tag,
    wrong_unit,
    wrong_unit_and_hole,
)

from popmq.broker.doctor.examination import Diagnosis
from popmq.broker.doctor.finding import RequiredAction
from popmq.broker.doctor.repair import ReadLock, chosen, repair
from popmq.broker.node.broker_process import DataLock
from popmq.cli.local.doctor import examine
from popmq.common.errors import ConfigError
from popmq.common.record.message import RecordKind, Stamp, encode_record
from popmq.common.settings.settings import Settings
from popmq.testing.disk.lying_disk import ResidentDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "doctor-damages.md"
SEGMENT = SMALL.store.segment_bytes
BODY = 60_000
TOPICS = ("orders", "other")
NO_SNAPSHOT = 1 << 40


def settings_on(folder: Path, *, snapshots: bool) -> Settings:
    every = 32 << 10 if snapshots else NO_SNAPSHOT
    return replace(
        SMALL,
        broker=replace(SMALL.broker, data=str(folder)),
        store=replace(SMALL.store, snapshot_bytes=every),
    )


def start(folder: Path, *, snapshots: bool = False) -> CoreBroker:
    return CoreBroker(disk=ResidentDisk(), settings=settings_on(folder, snapshots=snapshots))


def fill(core: CoreBroker, first: int, count: int) -> None:
    for number in range(first, first + count):
        for topic in TOPICS:
            body = b"%s-%03d-" % (topic.encode(), number) + bytes(BODY)
            core.send(topic, body, queue_id=number % 2)


def made_store(folder: Path, *, clean: bool, snapshots: bool) -> None:
    """Three segments and more; some messages acked, some in flight; a checkpoint in the middle
    of a killed store, at the end of one that was stopped."""
    core = start(folder, snapshots=snapshots)
    for topic in TOPICS:
        core.topic(topic, queues=2)
    core.group("worker")
    fill(core, 0, 20)
    got = core.receive("orders", "worker", limit=8)
    core.ack("orders", "worker", *(delivery.handle for delivery in got[:5]))
    core.advance(11_000)
    fill(core, 20, 10)
    core.receive("other", "worker", limit=3)
    if clean:
        core.stop()
        if not snapshots:
            shutil.rmtree(folder / "snapshot")
    else:
        core.broker.release_files()


def delivered(folder: Path, snapshots: bool) -> dict[str, list[bytes]]:
    """Everything a fresh group gets, from a broker that starts on the folder; then it stops."""
    core = start(folder, snapshots=snapshots)
    results: dict[str, list[bytes]] = {}
    for topic in TOPICS:
        results[topic] = []
        while core.broker.registry.find_topic(topic):
            batch = core.receive(topic, "fresh")
            if not batch:
                break
            results[topic] += [delivery.head for delivery in batch]
    core.stop()
    return results


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@dataclass(frozen=True)
class Case:
    damage: Callable[[Path], None]
    clean: bool = True
    snapshots: bool = False
    what: tuple[str, ...] = ()  # every finding, but those about a kill
    need: RequiredAction = RequiredAction.NOTHING
    loses: bool = False
    unread: int = 0  # messages that are intact, but not delivered as things are

    def __str__(self) -> str:
        stop = "stopped" if self.clean else "killed"
        name = self.damage.__name__.replace("_", " ")
        return f"{name}, {stop}{', snapshot' if self.snapshots else ''}"


BELOW, MIDDLE, HELD, HEAD = (
    "damage below the checkpoint",
    "damage in the middle",
    "damage below a snapshot",
    "oldest segment missing",
)
CASES = (
    Case(nothing),
    Case(nothing, clean=False),
    Case(nothing, snapshots=True),
    Case(torn_tail, clean=False, what=("torn tail",)),
    Case(torn_tail, what=(BELOW,), need=RequiredAction.ACCEPT_LOSS),
    Case(file_ends_in_a_header, clean=False, what=("torn tail",)),
    Case(file_ends_in_a_header, what=(BELOW,), need=RequiredAction.ACCEPT_LOSS),
    Case(torn_tail, snapshots=True, what=(BELOW,), need=RequiredAction.ACCEPT_LOSS),
    Case(flip_last_but_three, snapshots=True, what=(HELD,), need=RequiredAction.HUMAN, loses=True),
    Case(
        wrong_unit_and_hole,
        snapshots=True,
        what=("bad index", BELOW),
        need=RequiredAction.ACCEPT_LOSS,
    ),
    Case(garbage_behind_the_end, what=("trailing garbage",)),
    Case(garbage_behind_the_end, clean=False, what=("trailing garbage",)),
    Case(
        flip_last_but_three,
        clean=False,
        what=(MIDDLE,),
        need=RequiredAction.ACCEPT_LOSS,
        loses=True,
    ),
    Case(flip_last_but_three, what=(BELOW,), need=RequiredAction.ACCEPT_LOSS, loses=True),
    Case(
        flip_first_message, clean=False, what=(BELOW,), need=RequiredAction.ACCEPT_LOSS, loses=True
    ),
    Case(flip_first_message, snapshots=True, what=(HELD,), need=RequiredAction.HUMAN, loses=True),
    Case(
        remove_first_segment,
        snapshots=True,
        what=(HEAD,),
        need=RequiredAction.ACCEPT_LOSS,
        loses=True,
    ),
    Case(remove_middle_segment, what=(BELOW,), need=RequiredAction.ACCEPT_LOSS, loses=True),
    Case(padding_size, what=("damaged padding",), need=RequiredAction.REPAIR),
    Case(foreign_file, what=("foreign file",), need=RequiredAction.REPAIR),
    Case(no_checkpoint, what=("no checkpoint", "no abort file")),
    Case(no_checkpoint, clean=False, what=("no checkpoint",)),
    Case(garbled_checkpoint, what=("damaged checkpoint",)),
    Case(checkpoint_between_records, what=("wrong checkpoint",), need=RequiredAction.REPAIR),
    Case(shortened_units, what=("bad index",)),
    Case(wrong_unit, what=("bad index",)),
    Case(wrong_unit, snapshots=True, what=("bad index",)),
    Case(wrong_tag, clean=False, what=("bad index",)),
    Case(wrong_tag, snapshots=True, what=("bad index",)),
    Case(unit_of_its_neighbour, what=("bad index",)),
    Case(units_of_another_queue, what=("bad index",)),
    Case(doubled_unit, what=("bad index",), need=RequiredAction.NOTHING),
    Case(wrong_revive_unit, what=("bad index",), need=RequiredAction.REPAIR),
    Case(no_index_at_all),
    Case(odd_file_in_a_queue, what=("bad index",), need=RequiredAction.REPAIR),
    Case(queue_of_a_stranger, what=("queue of no topic",)),
    Case(damaged_snapshot, snapshots=True, what=("damaged snapshot",)),
)
OF_A_KILL = {"not stopped cleanly", "index behind the log", "no abort file"}


def worst(diagnosis: Diagnosis) -> RequiredAction:
    return max(
        (finding.need for finding in diagnosis.findings),
        key=list(RequiredAction).index,
        default=RequiredAction.NOTHING,
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[pytest.mark.more] if number % 4 else [])
        for number, case in enumerate(CASES)
    ],
)
def test_each_damage_is_named_mended_and_what_is_kept_is_delivered(
    tmp_path: Path, case: Case
) -> None:
    folder = tmp_path / "data"
    made_store(folder, clean=case.clean, snapshots=case.snapshots)
    whole = examine(str(folder))
    case.damage(folder)
    before = hashes(folder)
    sick = examine(str(folder))
    assert hashes(folder) == before, "looking changed a file"
    result = {finding.what for finding in sick.findings}
    assert result - OF_A_KILL == set(case.what) - OF_A_KILL, sick.findings
    assert worst(sick) is case.need, sick.findings
    assert sick.healthy == (case.need is RequiredAction.NOTHING)
    assert row(case, sick) in PAGE.read_text(encoding="utf-8"), row(case, sick)

    if case.need is RequiredAction.ACCEPT_LOSS:
        assert not chosen(sick, accept_loss=False), "a loss must be accepted"
    findings = chosen(sick, accept_loss=True)
    if findings:
        room = folder / repair(str(folder), findings)
        assert json.loads((room / "findings.json").read_text())
        well = examine(str(folder))
        assert well.healthy, well.findings
        assert well.summary.messages == sick.summary.messages
        assert not [f for f in well.findings if f.repairs], "repairing twice finds work twice"
    kept = {name: number for name, number in sick.summary.messages.items() if name in TOPICS}
    all_there = {name: whole.summary.messages[name] for name in TOPICS}
    assert (sum(kept.values()) < sum(all_there.values())) == case.loses
    got = delivered(folder, case.snapshots)
    there = {name: len(set(bodies)) for name, bodies in got.items()}
    if case.unread:
        assert sum(there.values()) == sum(kept.values()) - case.unread
    else:
        assert there == kept
    for name, bodies in got.items():
        assert sorted(bodies) == sorted(set(bodies)), f"{name}: a message came twice"
    again = examine(str(folder))
    assert again.healthy or case.need is RequiredAction.HUMAN, again.findings


def row(case: Case, diagnosis: Diagnosis) -> str:
    """A line of the table in docs/reference/doctor-damages.md."""
    shown = [finding for finding in diagnosis.findings if finding.what not in OF_A_KILL]
    text = "; ".join(dict.fromkeys(finding.what for finding in shown)) or "healthy"
    consequence = shown[0].consequence if shown else "nothing is lost"
    kept = sum(number for name, number in diagnosis.summary.messages.items() if name in TOPICS)
    starts = "yes" if diagnosis.summary.starts else "no"
    delivered = kept - case.unread
    needs = worst(diagnosis).value
    return f"| {case} | {text} | {starts} | {consequence} | {needs} | {delivered}/60 |"


def test_a_missing_first_segment_needs_a_snapshot_to_go_on_without_it(tmp_path: Path) -> None:
    made_store(tmp_path, clean=True, snapshots=False)
    remove_first_segment(tmp_path)
    sick = examine(str(tmp_path))
    assert {finding.what for finding in sick.findings} == {HEAD, "start refused"}
    assert worst(sick) is RequiredAction.HUMAN
    assert not chosen(sick, accept_loss=True)


def test_a_directory_in_use_is_refused_with_its_process_and_left_alone(tmp_path: Path) -> None:
    made_store(tmp_path / "data", clean=True, snapshots=False)
    held = DataLock(str(tmp_path / "data"))
    before = hashes(tmp_path / "data")
    with pytest.raises(ConfigError, match=f"is used by process {os.getpid()}"):
        ReadLock(str(tmp_path / "data"))
    held.release()
    ReadLock(str(tmp_path / "data")).release()
    assert hashes(tmp_path / "data") == before


def test_a_directory_that_no_process_used_needs_no_lock(tmp_path: Path) -> None:
    ReadLock(str(tmp_path)).release()
    assert list(tmp_path.iterdir()) == []
    assert examine(str(tmp_path)).healthy
    with pytest.raises(ConfigError, match="no data directory"):
        ReadLock(str(tmp_path / "nothing"))


def test_a_snapshot_ahead_of_the_log_is_taken_away(tmp_path: Path) -> None:
    made_store(tmp_path, clean=True, snapshots=True)
    for number, file in enumerate(sorted((tmp_path / "commitlog").iterdir())):
        if number > 1:
            file.unlink()
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "abort").touch()
    sick = examine(str(tmp_path))
    assert [finding.what for finding in sick.findings if finding.need is RequiredAction.REPAIR]
    assert {"snapshot ahead of the log"} <= {finding.what for finding in sick.findings}
    repair(str(tmp_path), chosen(sick, accept_loss=False))
    assert not [path for path in (tmp_path / "snapshot").iterdir() if int(path.name) > 2 * SEGMENT]
    assert examine(str(tmp_path)).healthy


def test_a_record_out_of_order_needs_a_human(tmp_path: Path) -> None:
    made_store(tmp_path, clean=False, snapshots=False)
    file, end = log_end(tmp_path)
    epoch_start = encode_record(
        kind=RecordKind.EPOCH_START,
        stamp=Stamp(epoch=0, log_ms=5, wall_ms=5),
        position=int(file.name) + end,
        topic_id=0,
        queue_id=0,
        queue_offset=0,
    )
    with file.open("r+b") as opened:
        opened.seek(end)
        opened.write(epoch_start)
    sick = examine(str(tmp_path))
    details = [finding.detail for finding in sick.findings if finding.what == "log out of order"]
    assert len(details) == 2
    assert "epoch 0 follows epoch 1" in details[0]
    assert not sick.healthy


@pytest.mark.parametrize("size", [0, 100, 5000, SEGMENT - 1])
def test_the_only_segment_may_be_short(tmp_path: Path, size: int) -> None:
    core = start(tmp_path)
    core.topic("orders", queues=1)
    core.broker.release_files()
    file = tmp_path / "commitlog" / f"{0:020d}"
    file.write_bytes(file.read_bytes()[:size])
    for name in sorted((tmp_path / "commitlog").iterdir())[1:]:
        name.unlink()
    sick = examine(str(tmp_path))
    assert sick.healthy, sick.findings
    assert sick.summary.topics == (1 if size >= 5000 else 0)


def test_a_segment_that_does_not_fit_the_others_needs_a_human(tmp_path: Path) -> None:
    made_store(tmp_path, clean=True, snapshots=False)
    (tmp_path / "commitlog" / f"{99:020d}").write_bytes(b"")
    sick = examine(str(tmp_path), segment_bytes=SEGMENT)
    assert "misplaced segment" in {finding.what for finding in sick.findings}
    assert worst(sick) is RequiredAction.HUMAN
    assert chosen(sick, accept_loss=True) == []


def test_a_log_that_retention_shortened_is_healthy_and_its_index_mends_itself(
    tmp_path: Path,
) -> None:
    core = start(tmp_path, snapshots=True)
    for topic in TOPICS:
        core.topic(topic, queues=2)
    fill(core, 0, 40)
    for days in range(5):
        core.advance(24 * 3_600_000)
        fill(core, 100 + days * 5, 5)
    core.stop()
    well = examine(str(tmp_path))
    assert well.summary.log_start > 0
    assert well.findings == ()
    flip(units_file(tmp_path), units_file(tmp_path).stat().st_size - 13)
    sick = examine(str(tmp_path))
    assert [(finding.what, finding.need) for finding in sick.findings] == [
        ("bad index", RequiredAction.NOTHING)
    ]
    assert sum(map(len, delivered(tmp_path, True).values())) == sum(well.summary.messages.values())
    assert examine(str(tmp_path)).findings == ()
