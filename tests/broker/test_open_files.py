"""Files of queues are open while they are used; few descriptors are never a broken disk."""

import errno
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from popmq.broker.log.open_files import OpenFiles, PooledSegment
from popmq.common.disk import ColdRead, DescriptorReserve, DiskFile, RealDisk, RealFile


def segments(folder: Path, count: int, pool: OpenFiles) -> list[PooledSegment]:
    disk = RealDisk()
    return [
        PooledSegment(disk, str(folder / f"{n:020}"), start=0, size=4_096, create=True, pool=pool)
        for n in range(count)
    ]


def test_many_segments_are_written_and_read_through_few_open_files(tmp_path: Path) -> None:
    pool = OpenFiles(4)
    files = segments(tmp_path, 50, pool)
    for number, file in enumerate(files):
        file.write(0, [b"%05d" % number])
        assert pool.count <= 4
    for number, file in enumerate(files):
        assert file.read(0, 5) == b"%05d" % number
        file.sync()
    assert pool.count <= 4
    for file in files:
        file.close()
    assert pool.count == 0


def test_a_file_that_is_used_is_not_closed(tmp_path: Path) -> None:
    pool = OpenFiles(1)
    used, *others = segments(tmp_path, 5, pool)
    used.take()
    for other in others:
        other.write(0, [b"x"])
    assert used._file.size() == 0
    used.put_back()
    others[0].write(0, [b"x"])
    assert pool.count == 1


def test_threads_share_the_open_files(tmp_path: Path) -> None:
    pool = OpenFiles(3)
    files = segments(tmp_path, 12, pool)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(300):
                file = files[(number * 7 + turn) % 12]
                file.write(number * 8, [b"%08d" % turn])
                assert file.read(number * 8, 8) == b"%08d" % turn
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.count <= 3


def test_a_cold_read_is_good_after_its_file_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = OpenFiles(1)
    cold, other = segments(tmp_path, 2, pool)
    cold.write(0, [b"content"])
    monkeypatch.setattr(RealFile, "view_cached", lambda self, size, offset: None)
    with pytest.raises(ColdRead) as raised:
        cold.read_warm(0, 7)
    other.write(0, [b"x"])
    raised.value.warm()
    assert cold.read(0, 7) == b"content"


def test_a_deleted_segment_is_not_synced_and_its_file_is_closed(tmp_path: Path) -> None:
    pool = OpenFiles(1)
    gone, other = segments(tmp_path, 2, pool)
    other.write(0, [b"x"])
    gone.delete()
    gone.sync()
    assert pool.count == 1


def test_an_idle_file_is_closed_where_the_system_has_no_descriptor_left(tmp_path: Path) -> None:
    pool = OpenFiles(100)
    idle = segments(tmp_path, 3, pool)
    for segment in idle:
        segment.write(0, [b"x"])
    tries = []

    def open_file() -> DiskFile:
        tries.append(pool.count)
        if len(tries) < 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return RealFile(str(tmp_path / "new"), create=True)

    new = segments(tmp_path, 1, pool)[0]
    pool.close(new)
    pool.take(new, partial(open_file))
    assert tries == [3, 2, 1]


def test_the_reserve_lets_a_file_be_opened_when_none_is_left() -> None:
    reserve = DescriptorReserve(2)
    reserve.fill()
    assert [reserve.release() for _ in range(3)] == [True, True, False]
    reserve.fill()
    assert reserve.release()
