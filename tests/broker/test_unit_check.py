"""Index units that are not what was written: seen, and found again in the log."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from popmq.broker.log.queue_unit import (
    UNIT_SIZE,
    QueueUnit,
    index_unit,
    intact_unit,
    queue_seed,
    with_check,
)
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.message import tag_hash
from popmq.testing.disk.lying_disk import ResidentDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker, pop

SEED = queue_seed("data/consumequeue/orders@64/0")


def test_a_unit_is_what_was_written_at_its_offset() -> None:
    rng = random.Random(7)
    for offset in (0, 1, 65_535, 65_536, 10**9):
        unit = QueueUnit(rng.getrandbits(48), rng.getrandbits(32) or 1, rng.getrandbits(64))
        assert intact_unit(with_check(index_unit(*unit), SEED, offset), 0, SEED, offset) == unit


def test_any_flipped_bit_of_a_unit_is_seen() -> None:
    right = with_check(index_unit(123_456_789, 1_280, tag_hash("paid")), SEED, 5)
    for bit in range(8 * UNIT_SIZE):
        wrong = bytearray(right)
        wrong[bit // 8] ^= 1 << bit % 8
        assert intact_unit(bytes(wrong), 0, SEED, 5) is None, f"bit {bit}"


def test_zeros_are_no_unit_whatever_their_offset() -> None:
    assert all(intact_unit(bytes(UNIT_SIZE), 0, SEED, offset) is None for offset in range(1 << 16))


def test_a_unit_of_another_offset_or_queue_is_seen() -> None:
    unit = with_check(index_unit(4_711, 100, 0), SEED, 5)
    assert intact_unit(unit, 0, SEED, 6) is None
    assert intact_unit(unit, 0, queue_seed("consumequeue/orders@64/1"), 5) is None
    assert intact_unit(unit, 0, queue_seed("elsewhere/orders@64/0"), 5) is not None


# -- a broker on files


def started(folder: Path) -> CoreBroker:
    settings = replace(SMALL, broker=replace(SMALL.broker, data=str(folder)))
    return CoreBroker(disk=ResidentDisk(), settings=settings)


def stored(folder: Path, *, bodies: int = 60) -> list[bytes]:
    """Messages of two topics, so that neighbours in a queue are none in the log."""
    core = started(folder)
    for topic in ("orders", "other"):
        core.topic(topic, queues=1)
    sent = []
    for number in range(bodies):
        body = b"%03d" % number + bytes(50_000 if number % 20 == 19 else 10)
        core.send("orders", body, tag="paid" if number % 2 else "open")
        core.send("other", body)
        sent.append(body)
    core.stop()
    return sent


def units_file(folder: Path) -> Path:
    return next(iter(folder.glob("consumequeue/orders@*/0/*")))


def taken(core: CoreBroker, expression: str = "") -> list[bytes]:
    results: list[bytes] = []
    while True:
        request = pop("orders", "g" + expression, expression=expression)
        batch = hop.decode_pop_reply(core.reply(Kind.POP, request)).deliveries
        if not batch:
            return results
        results += (delivery.head for delivery in batch)


@pytest.mark.parametrize("byte", range(UNIT_SIZE))
def test_a_flipped_byte_of_a_unit_costs_no_message_and_is_mended(tmp_path: Path, byte: int) -> None:
    sent = stored(tmp_path)
    file = units_file(tmp_path)
    whole = file.read_bytes()
    damaged = bytearray(whole)
    for offset in (0, 7, 8, 31, len(sent) - 2):
        damaged[offset * UNIT_SIZE + byte] ^= 0x5A
    file.write_bytes(damaged)
    core = started(tmp_path)
    assert taken(core) == sent
    assert taken(core, "paid") == sent[1::2]
    core.stop()
    assert file.read_bytes() == whole
    assert core.broker.store.reader.damaged == 0


def test_a_whole_file_of_damaged_units_is_mended_unit_by_unit(tmp_path: Path) -> None:
    sent = stored(tmp_path)
    file = units_file(tmp_path)
    whole = file.read_bytes()
    core = started(tmp_path)  # has opened the queue already
    assert core.broker.store.queue(64, 0).count == len(sent)
    file.write_bytes(b"\x7f" * len(whole))
    assert taken(core) == sent
    core.advance(11_000)  # a checkpoint syncs what was mended
    core.broker.release_files()
    assert file.read_bytes() == whole


def test_a_damaged_unit_is_looked_for_off_the_loop(tmp_path: Path) -> None:
    sent = stored(tmp_path)
    file = units_file(tmp_path)
    data = bytearray(file.read_bytes())
    data[2 * UNIT_SIZE + 3] ^= 1  # none that a start looks at
    file.write_bytes(data)
    core = started(tmp_path)
    request = pop("orders", "g", limit=3)
    answer = core.ask(Kind.POP, request, settle=False)
    assert not answer.heard
    assert core.broker.pop.service.metrics.cold_pops == 1
    core.run_until_idle()
    assert answer.body is not None
    assert [delivery.head for delivery in hop.decode_pop_reply(answer.body).deliveries] == sent[:3]


def test_a_damaged_unit_of_a_damaged_record_harms_that_message_only(tmp_path: Path) -> None:
    sent = stored(tmp_path)
    core = started(tmp_path)
    (unit,) = core.broker.store.queue(64, 0).units(10, 1)
    core.broker.release_files()
    log = tmp_path / "commitlog" / f"{0:020d}"
    with log.open("r+b") as opened:
        opened.seek(unit.position + unit.size - 3)
        opened.write(b"\xff\xff\xff")
    file = units_file(tmp_path)
    data = bytearray(file.read_bytes())
    data[10 * UNIT_SIZE + 4] ^= 1
    core = CoreBroker(
        disk=ResidentDisk(),
        settings=replace(SMALL, broker=replace(SMALL.broker, data=str(tmp_path))),
    )
    file.write_bytes(data)
    assert taken(core) == sent[:10] + sent[11:]
    assert core.broker.store.reader.damaged == 1


def test_retention_is_not_misled_by_a_damaged_unit(tmp_path: Path) -> None:
    sent = stored(tmp_path)
    core = started(tmp_path)
    queue = core.broker.store.queue(64, 0)
    second = queue.units(19, 1)[0].position
    file = units_file(tmp_path)
    data = bytearray(file.read_bytes())
    for offset in range(1, len(sent) - 1):
        data[offset * UNIT_SIZE + 1] ^= 0xFF
    file.write_bytes(data)
    queue.log_starts_at(second)
    assert queue.min_offset == 19
