"""EpochFile: which epoch a record is of, and up to where two logs agree.

The names in brackets are RocketMQ's tests (EpochFileCacheTest) whose behaviour they cover.
"""

import itertools
from collections.abc import Iterator

import pytest

from popmq.broker.ha.epoch_file import EpochFile, consistent_point
from popmq.common.errors import StoreDamaged
from popmq.common.protocol.replication_payloads import EpochEntry
from popmq.testing.disk.lying_disk import LyingDisk, PowerCut

PATH = "data/epochs"
SAMPLE = [EpochEntry(1, 100), EpochEntry(2, 300), EpochEntry(3, 500)]


def file_with(disk: LyingDisk, *entries: EpochEntry, limit: int = 1_000) -> EpochFile:
    epoch_file = EpochFile(disk, PATH, limit=limit)
    for entry in entries:
        epoch_file.append(*entry)
    return epoch_file


def test_entries_are_there_after_a_restart() -> None:  # [testInitFromFile]
    disk = LyingDisk()
    assert file_with(disk, *SAMPLE).entries == SAMPLE
    disk.restore_power()
    assert EpochFile(disk, PATH).entries == SAMPLE


def test_a_change_is_the_old_file_or_the_new_one_whenever_the_power_goes() -> None:
    for operations in itertools.count():
        disk = LyingDisk()
        file = file_with(disk, *SAMPLE[:2])
        disk.cut_at(operations)
        try:
            file.append(*SAMPLE[2])
        except PowerCut:
            disk.restore_power()
            assert EpochFile(disk, PATH).entries in (SAMPLE[:2], SAMPLE)
        else:
            disk.restore_power()
            assert EpochFile(disk, PATH).entries == SAMPLE
            break


def test_a_file_that_was_changed_is_not_believed() -> None:
    disk = LyingDisk()
    file_with(disk, *SAMPLE)
    handle = disk.open(PATH)
    for slot_at in (0, handle.size() // 2):
        handle.write(b"9", slot_at + 40)
    with pytest.raises(StoreDamaged, match="data/epochs is damaged"):
        EpochFile(disk, PATH)


def test_cutting_the_tail_drops_epochs_that_begin_behind_it() -> None:  # [testTruncate]
    file = file_with(LyingDisk(), *SAMPLE)
    file.cut_suffix(500)
    assert file.entries == SAMPLE[:2]
    file.cut_suffix(301)
    assert file.entries == SAMPLE[:2]
    file.cut_suffix(300)
    assert file.entries == SAMPLE[:1]
    file.cut_suffix(100)
    assert file.entries == []


def test_a_cut_is_durable() -> None:
    disk = LyingDisk()
    file_with(disk, *SAMPLE).cut_suffix(300)
    disk.restore_power()
    assert EpochFile(disk, PATH).entries == SAMPLE[:1]


@pytest.mark.parametrize(
    ("position", "epoch"), [(99, None), (100, 1), (299, 1), (300, 2), (499, 2), (500, 3), (1e6, 3)]
)
def test_the_epoch_of_a_position_is_found(position: int, epoch: int | None) -> None:
    entry = file_with(LyingDisk(), *SAMPLE).entry_at(position)  # [testFindEpochEntryByOffset]
    assert (entry.epoch if entry else None) == epoch


@pytest.mark.parametrize(
    ("position", "end"), [(0, 100), (100, 300), (299, 300), (300, 500), (500, 900), (899, 900)]
)
def test_a_block_ends_with_its_epoch(position: int, end: int) -> None:
    assert file_with(LyingDisk(), *SAMPLE).end_of_epoch(position, 900) == end


def test_an_epoch_without_a_record_leaves_no_entry_behind() -> None:
    # RocketMQ refuses an entry with an equal start and keeps the entry of the lost tail.
    file = file_with(LyingDisk(), EpochEntry(1, 0), EpochEntry(2, 100), EpochEntry(3, 100))
    assert file.entries == [EpochEntry(1, 0), EpochEntry(3, 100)]


def test_entries_of_a_tail_that_was_lost_go_when_the_next_epoch_begins() -> None:
    file = file_with(LyingDisk(), *SAMPLE)
    file.append(4, 250)
    assert file.entries == [EpochEntry(1, 100), EpochEntry(4, 250)]


@pytest.mark.parametrize("epoch", [2, 3])
def test_an_epoch_never_begins_behind_a_newer_one(epoch: int) -> None:
    file = file_with(LyingDisk(), *SAMPLE)
    with pytest.raises(AssertionError, match=f"epoch {epoch} begins at 900"):
        file.append(epoch, 900)
    assert file.entries == SAMPLE


def test_the_oldest_entries_are_forgotten_at_the_limit() -> None:
    file = file_with(LyingDisk(), *SAMPLE, limit=2)
    assert file.entries == SAMPLE[1:]


# -- consistent point [testFindConsistentPointSample1..4]


def test_logs_that_differ_in_length_agree_up_to_the_shorter_end() -> None:
    own, masters = SAMPLE, SAMPLE
    assert consistent_point(own, 700, masters, 900) == 700
    assert consistent_point(own, 900, masters, 700) == 700
    assert consistent_point(own, 700, masters, 700) == 700


def test_a_follower_that_is_an_epoch_ahead_goes_back_to_the_last_common_one() -> None:
    own = [*SAMPLE, EpochEntry(4, 700)]
    assert consistent_point(own, 900, SAMPLE, 650) == 650
    assert consistent_point(own, 900, SAMPLE, 800) == 700


def test_logs_that_part_inside_an_epoch_agree_up_to_the_first_end_of_it() -> None:
    own = [EpochEntry(1, 100), EpochEntry(2, 300), EpochEntry(3, 450)]
    masters = [EpochEntry(1, 100), EpochEntry(2, 300), EpochEntry(4, 500)]
    assert consistent_point(own, 600, masters, 900) == 450
    assert consistent_point(masters, 900, own, 600) == 450


def test_an_epoch_that_begins_elsewhere_is_another_one() -> None:
    own = [EpochEntry(1, 100), EpochEntry(2, 200)]
    masters = [EpochEntry(1, 100), EpochEntry(2, 300)]
    assert consistent_point(own, 400, masters, 900) == 200


def test_logs_without_a_common_epoch_agree_nowhere() -> None:
    own = [EpochEntry(1, 200), EpochEntry(2, 500)]
    masters = [EpochEntry(3, 200), EpochEntry(4, 500)]
    assert consistent_point(own, 900, masters, 900) is None
    assert consistent_point([], 0, masters, 900) is None
    assert consistent_point(own, 900, [], 0) is None


def test_a_log_whose_front_was_deleted_still_agrees_with_a_whole_one() -> None:
    assert consistent_point(SAMPLE[2:], 700, SAMPLE, 900) == 700
    assert consistent_point(SAMPLE, 700, SAMPLE[2:], 900) == 700


def test_any_two_logs_that_three_masters_can_leave_agree_exactly_where_they_are_the_same() -> None:
    """Each master goes on from any part of an older log; a broker has any part of any of them.

    An epoch has one master, so one record of it at a position: where two logs have a record of
    one epoch at one position, all before it is the same.
    """
    looked = 0
    for masters in _histories():
        logs = {log[:size] for log in masters for size in range(len(log) + 1)}
        for entry, other in itertools.product(logs, repeat=2):
            point = consistent_point(_entries(entry), len(entry), _entries(other), len(other))
            same = [
                n + 1 for n, both in enumerate(zip(entry, other, strict=False)) if len({*both}) == 1
            ]
            assert (point or 0) == max(same, default=0)
            looked += 1
    assert looked > 5_000


def _histories() -> Iterator[list[tuple[int, ...]]]:
    """Logs of the masters of epochs 1 to 3, as the epochs of their records."""
    sizes = range(3)
    for first, second, third in itertools.product(sizes, repeat=3):
        entry = (1,) * first
        for kept in range(len(entry) + 1):
            two = entry[:kept] + (2,) * second
            for base in (entry, two):
                for kept_again in range(len(base) + 1):
                    yield [entry, two, base[:kept_again] + (3,) * third]


def _entries(epochs: tuple[int, ...]) -> list[EpochEntry]:
    starts: dict[int, int] = {}
    for position, epoch in enumerate(epochs):
        starts.setdefault(epoch, position)
    return [EpochEntry(epoch, start) for epoch, start in starts.items()]
