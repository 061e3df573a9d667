"""The newest bytes in memory are those of the log, also after its end was cut and written anew.

A slave that follows close behind gets them from here, not from the disk: what was left of a cut
end would go to it as the log, and be confirmed.
"""

import random

from popmq.broker.log.commit_log import CommitLog
from popmq.broker.log.log_block import LogBlock
from popmq.broker.log.log_tail import LogTail
from popmq.testing.disk.lying_disk import LyingDisk


def block(position: int, byte: int, size: int = 100) -> LogBlock:
    return LogBlock(position, bytes([byte]) * size, position + size, position, 1)


def log() -> CommitLog:
    commit_log = CommitLog(LyingDisk(), "log", segment_bytes=1 << 20)
    commit_log.tail = LogTail(1 << 20)
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
