"""Torn tail or damage: a later record that proves damage is found wherever it stands."""

from pathlib import Path

import pytest
from broker.test_store import kill, log_files, real_core

from popmq.broker.log.commit_log import CommitLog
from popmq.common.errors import StoreDamaged
from popmq.common.record.message import HEADER_SIZE, MESSAGE_HEADER_SIZE, Stamp, encode_message
from popmq.testing.disk.lying_disk import LyingDisk


def test_a_later_record_proves_damage_also_when_its_checksum_ends_in_01(tmp_path: Path) -> None:
    """The byte before a record's version is the last one of its checksum."""
    broker = real_core(tmp_path)
    broker.topic("orders", queues=1)
    store, starts = broker.broker.store, [broker.broker.store.end]
    for number in range(5_000):
        broker.send("orders", b"message %d" % number)
        (file,) = log_files(tmp_path)
        starts.append(store.end)
        if file.read_bytes()[starts[-2] + 7] == 1 and number:
            break
    else:
        pytest.fail("no checksum of 5,000 ends in 01")
    kill(broker)
    (tmp_path / "checkpoint").unlink(missing_ok=True)
    damaged = starts[-3]
    data = bytearray(file.read_bytes())
    data[damaged + HEADER_SIZE] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreDamaged, match=f"the one at {starts[-2]} shows that it was durable"):
        real_core(tmp_path)
    assert file.read_bytes() == bytes(data)


@pytest.mark.parametrize("before", [1, 8, 9, 10, 24, 56])
def test_a_record_that_proves_damage_may_lie_over_the_border_of_two_reads(before: int) -> None:
    """Its header begins `before` bytes before 4 MiB, where the search reads the next piece."""
    log = CommitLog(LyingDisk(), "log", segment_bytes=8 << 20)
    log.load()
    stamp = Stamp(1, 1_000, 1_000)
    for size in ((4 << 20) - before - MESSAGE_HEADER_SIZE, 20):
        place = log.make_room(MESSAGE_HEADER_SIZE + size, stamp)
        numbers = {"topic_id": 64, "queue_id": 0, "queue_offset": 0, "tag_hash": 0}
        log.append(
            encode_message(
                stamp=stamp,
                position=place,
                head=b"\x55" * size,
                properties=b"",
                token=b"",
                attempt=1,
                unconfirmed=0,
                **numbers,
            )
        )
    batch = log.take_batch()
    assert batch is not None
    log.write(batch)
    assert log.durable_beyond(100) == (4 << 20) - before
