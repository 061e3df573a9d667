"""The newest bytes in memory are those of the log, also after its end was cut and written anew.

A slave that follows close behind gets them from here, not from the disk: what was left of a cut
end would go to it as the log, and be confirmed.
"""

import random

import pytest

from popmq.broker.log.commit_log import CommitLog
from popmq.broker.log.log_block import LogBlock
from popmq.broker.log.log_tail import LogTail
from popmq.broker.log.queue_unit import QueueUnit
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import CoreBroker


def block(position: int, byte: int, size: int = 100) -> LogBlock:
    return LogBlock(position, bytes([byte]) * size, position + size, position, 1)


def log() -> CommitLog:
    commit_log = CommitLog(LyingDisk(), "log", segment_bytes=1 << 20, tail_bytes=4 << 20)
    commit_log.load()
    return commit_log


def tail_of(commit_log: CommitLog, position: int) -> bytes | None:
    assert commit_log.tail is not None
    return commit_log.tail.read(position, 1 << 20, 1 << 20)


def test_a_slave_whose_end_was_cut_hands_on_what_it_got_instead() -> None:
    commit_log = log()
    for at, byte in ((0, 1), (100, 2), (200, 3)):
        commit_log.append_block(block(at, byte))
    commit_log.set_end(100)
    assert tail_of(commit_log, 100) is None
    for at, byte in ((100, 7), (180, 8)):
        commit_log.append_block(block(at, byte, 80))
    assert tail_of(commit_log, 100) == bytes([7]) * 80 + bytes([8]) * 80
    assert tail_of(commit_log, 0) == bytes([1]) * 100 + bytes([7]) * 80 + bytes([8]) * 80


def test_a_block_that_reaches_over_the_cut_keeps_its_front() -> None:
    """It may be nowhere else yet."""
    commit_log = log()
    commit_log.append_block(block(0, 1, 300))
    commit_log.set_end(120)
    commit_log.append_block(block(120, 2, 50))
    assert tail_of(commit_log, 0) == bytes([1]) * 120 + bytes([2]) * 50


def test_whatever_is_appended_and_cut_the_tail_is_the_log() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        tail, content, begins = LogTail(1 << 20), b"", [0]
        for _ in range(rng.randrange(1, 12)):
            if rng.random() < 0.3:
                cut = rng.choice(begins)
                tail.cut(cut)
                content, begins = content[:cut], [number for number in begins if number <= cut]
            piece = rng.randbytes(rng.randrange(1, 40))
            tail.add(len(content), piece)
            content += piece
            begins.append(len(content))
        result = tail.read(0, 1 << 20, 1 << 20)
        assert result == content


def test_what_the_log_has_deleted_is_not_in_memory_any_more() -> None:
    commit_log = log()
    for at in range(0, 3 << 20, 1 << 18):
        commit_log.append_block(block(at, 1, 1 << 18))
    assert commit_log.tail is not None
    units = [QueueUnit(at, 1 << 18, 0) for at in ((1 << 20) - (1 << 18), 1 << 20)]
    assert [commit_log.tail.records([unit]) is None for unit in units] == [False, False]
    commit_log.drop_before(1 << 20)
    assert [commit_log.tail.records([unit]) is None for unit in units] == [True, False]


def test_records_of_units_are_here_all_or_not_at_all() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        tail, expected, end = LogTail(rng.choice((100, 400, 1 << 20))), {}, 0
        for _ in range(rng.randrange(1, 12)):
            records = [rng.randbytes(rng.randrange(1, 40)) for _ in range(rng.randrange(1, 5))]
            tail.add_all(end, records)
            for record in records:
                expected[end] = record
                end += len(record)
            tail.trim(end)
        units = [QueueUnit(position, len(record), 0) for position, record in expected.items()]
        chosen = sorted(rng.sample(units, rng.randint(1, len(units))))
        kept = [unit for unit in units if tail.records([unit]) is not None]
        assert kept == units[len(units) - len(kept) :]
        found_records = tail.records(chosen)
        if set(chosen) <= set(kept):
            assert found_records == [expected[unit.position] for unit in chosen]
        else:
            assert found_records is None
        wrong = chosen[0]._replace(size=chosen[0].size + 1)
        assert tail.records([wrong]) is None
        assert tail.records([wrong._replace(position=end)]) is None


def test_consumers_that_keep_up_get_messages_without_a_read_of_the_file(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        core.send("orders", b"%d" % number)
    log = core.broker.store.reader._log
    reads: list[int] = []
    real = log.view_warm

    def view_warm(position: int, size: int) -> bytes | memoryview:
        reads.append(position)
        return real(position, size)

    monkeypatch.setattr(log, "view_warm", view_warm)
    first = core.receive("orders", "g")
    assert reads == []
    monkeypatch.setattr(log, "tail", None)  # the same messages from the file
    core.group("other")
    again = core.receive("orders", "other")
    assert reads
    contents = [
        sorted((got.head, got.properties, got.stored_ms) for got in deliveries)
        for deliveries in (first, again)
    ]
    assert contents[0] == contents[1]
    assert len(contents[0]) == 5
