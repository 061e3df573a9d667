"""Retention: what lives is moved, the rest goes, and offsets below the minimum answer clearly."""

from dataclasses import replace
from pathlib import Path

import pytest

from popmq.common.errors import Code, PopmqError, StoreDamaged
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import Settings, StoreSettings
from popmq.common.topics import CheckPoints
from popmq.common.wire import admin_pb2 as admin
from popmq.testing.disk.lying_disk import LyingDisk, ResidentDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker

HOUR_MS = 3_600_000
SHORT = replace(
    SMALL,
    store=StoreSettings(segment_bytes=1 << 20, snapshot_bytes=64 << 10, retention_hours=1),
)
BODY = bytes(50_000)


def on(folder: Path, settings: Settings = SHORT) -> CoreBroker:
    settings = replace(settings, broker=replace(SMALL.broker, data=str(folder)))
    return CoreBroker(disk=ResidentDisk(), settings=settings)


def log_files(folder: Path) -> list[int]:
    return sorted(int(file.name) for file in (folder / "commitlog").iterdir())


def fill(core: CoreBroker, count: int, *, every_ms: int = 60_000, topic: str = "orders") -> None:
    """`count` messages of 50 KB, one each `every_ms`."""
    for number in range(count):
        core.send(topic, b"%05d" % number + BODY)
        core.clock.advance(every_ms)
        core.run_steps()


def numbers(core: CoreBroker, group: str, topic: str = "orders") -> list[int]:
    results: list[int] = []
    while batch := core.receive(topic, group):
        for delivery in batch:
            results.append(int(delivery.head[:5]))
            assert core.ack(topic, group, delivery.handle)[0].code == Code.OK
    return sorted(results)


@pytest.mark.more
def test_old_segments_go_and_the_disk_stays_bounded(tmp_path: Path) -> None:
    core = on(tmp_path)
    core.topic("orders", queues=2)
    sizes = []
    for _ in range(10):
        fill(core, 60)
        sizes.append(len(log_files(tmp_path)))
    assert max(sizes) <= 12, sizes
    assert log_files(tmp_path)[0] > 0
    assert core.broker.store.retention.deleted_segments > 10


@pytest.mark.more
def test_unread_messages_expire_are_counted_and_the_rest_is_read_in_full(tmp_path: Path) -> None:
    core = on(tmp_path)
    core.topic("orders", queues=1)
    core.group("g")
    first = core.receive("orders", "g")
    assert first == []
    fill(core, 300)
    read = numbers(core, "g")
    assert read == list(range(read[0], 300))
    assert 100 < read[0] < 260
    assert core.broker.pop.service.metrics.expired == read[0]


def test_a_message_in_flight_for_longer_than_the_retention_is_moved_and_comes_back(
    tmp_path: Path,
) -> None:
    core = on(tmp_path)
    core.topic("orders", queues=1)
    core.send("orders", b"99999" + BODY)
    (held,) = core.receive("orders", "g", invisible_ms=12 * HOUR_MS)
    new = core.change("orders", "g", held.handle, 12 * HOUR_MS)
    fill(core, 300)
    assert log_files(tmp_path)[0] > 0
    assert core.broker.store.retention.relocated >= 1
    for clean in (True, False):
        if clean:
            core.stop()
        else:
            core.broker.release_files()
        core.start()
        assert core.broker.table.in_flight == 1
    core.clock.advance(13 * HOUR_MS)
    core.run_steps()
    back = [delivery for delivery in core.receive("orders", "g") if delivery.head[:5] == b"99999"]
    assert [delivery.attempt for delivery in back] == [2]
    assert back[0].head == b"99999" + BODY
    assert core.ack("orders", "g", new)[0].code == Code.INVALID_RECEIPT_HANDLE


def test_an_acked_message_is_not_moved(tmp_path: Path) -> None:
    core = on(tmp_path)
    core.topic("orders", queues=1)
    core.send("orders", b"00000" + BODY)
    (delivery,) = core.receive("orders", "g", invisible_ms=12 * HOUR_MS)
    core.ack("orders", "g", delivery.handle)
    fill(core, 200)
    assert core.broker.store.retention.deleted_segments > 0
    assert core.broker.store.retention.relocated == 0


def test_offsets_go_on_after_everything_of_a_queue_expired(tmp_path: Path) -> None:
    core = on(tmp_path)
    core.topic("quiet", queues=1)
    for number in range(5):
        assert core.send("quiet", b"%05d" % number).queue_offset == number
    core.topic("orders", queues=1)
    fill(core, 300)
    for restart in (False, True, True):
        if restart:
            core.broker.release_files()
            core.start()
        assert numbers(core, f"fresh-{core.broker.store.epoch}", "quiet") == []
    assert core.send("quiet", b"00005").queue_offset == 5
    assert numbers(core, "late", "quiet") == [5]


def test_a_missing_index_is_rebuilt_when_the_log_does_not_begin_at_0(tmp_path: Path) -> None:
    core = on(tmp_path)
    core.topic("quiet", queues=1)
    core.send("quiet", b"00000")
    core.topic("orders", queues=2)
    fill(core, 300)
    expected = numbers(core, "before")
    core.stop()
    for file in tmp_path.glob("consumequeue/*/*/*"):
        file.unlink()
    again = on(tmp_path)
    assert numbers(again, "after") == expected
    assert again.send("quiet", b"00001").queue_offset == 1
    assert numbers(again, "after", "quiet") == [1]
    again.stop()
    assert numbers(on(tmp_path), "at-last") == expected


def test_without_any_snapshot_a_log_that_does_not_begin_at_0_is_refused(tmp_path: Path) -> None:
    core = on(tmp_path)
    core.topic("orders", queues=1)
    fill(core, 200)
    core.stop()
    for file in (tmp_path / "snapshot").iterdir():
        file.unlink()
    with pytest.raises(StoreDamaged, match="no snapshot can be read"):
        on(tmp_path)


def test_the_log_can_be_bounded_in_bytes(tmp_path: Path) -> None:
    settings = replace(
        SHORT, store=replace(SHORT.store, retention_hours=1000, retention_bytes=4 << 20)
    )
    core = on(tmp_path, settings)
    core.topic("orders", queues=1)
    fill(core, 300, every_ms=11_000)
    size = core.broker.store.end - log_files(tmp_path)[0]
    assert size < 7 << 20
    read = numbers(core, "g")
    assert read == list(range(read[0], 300))


def test_a_log_that_grows_fast_is_bounded_in_bytes_at_any_moment(tmp_path: Path) -> None:
    """80 segments within eight seconds: the time alone is no reason to look."""
    settings = replace(
        SHORT, store=replace(SHORT.store, retention_hours=1000, retention_bytes=4 << 20)
    )
    core = on(tmp_path, settings)
    core.topic("orders", queues=1)
    for _ in range(40):
        fill(core, 40, every_ms=5)
        assert core.broker.store.end - log_files(tmp_path)[0] < 8 << 20


@pytest.mark.more
def test_a_day_of_retention_with_crashes_loses_no_live_message() -> None:
    """24 h under virtual time; every hour a message is taken and held for 10 h."""
    disk = LyingDisk()
    core = CoreBroker(disk=disk, settings=SHORT)
    core.topic("orders", queues=2)
    core.group("holder", max_attempts=1000)
    held: dict[int, bytes] = {}

    def consume() -> None:
        """Ack what is common, hold what is not; nothing stays unread."""
        while batch := core.receive("orders", "holder", invisible_ms=10 * HOUR_MS):
            for delivery in batch:
                if int(delivery.head[:5]) >= 90_000:
                    held[int(delivery.head[:5])] = delivery.handle
                else:
                    core.ack("orders", "holder", delivery.handle)

    for hour in range(24):
        core.send("orders", b"%05d" % (90_000 + hour) + BODY)
        consume()
        for _ in range(4):
            fill(core, 10, every_ms=90_000)
            consume()
        if hour % 5 == 2:
            disk.restore_power()
            core.start()
    names = disk.names(SHORT.broker.data + "/commitlog")
    assert len(names) < 20
    assert core.broker.store.retention.relocated >= 10
    done = set()
    for _ in range(12):
        for number, handle in held.items():
            if core.ack("orders", "holder", handle)[0].code == Code.OK:
                done.add(number)
        core.clock.advance(HOUR_MS)
        core.run_steps()
        consume()
    assert done == set(range(90_000, 90_024))


def short_lived(core: CoreBroker) -> None:
    body = admin.CreateTopicRequest(
        topic=admin.Topic(name="events", queues=1, retention_ms=10 * 60_000)
    )
    core.reply(Kind.CREATE_TOPIC, body.SerializeToString())


def test_a_topic_may_keep_its_messages_for_less_than_the_store(tmp_path: Path) -> None:
    core = on(tmp_path)
    short_lived(core)
    core.topic("orders", queues=1)
    core.group("g")
    assert core.receive("events", "g") == []
    for number in range(30):
        for topic in ("events", "orders"):
            core.send(topic, b"%05d" % number)
        core.clock.advance(60_000)
        core.run_steps()
    assert numbers(core, "g", "events") == list(range(20, 30))
    assert core.broker.pop.service.metrics.expired == 20
    assert numbers(core, "g", "orders") == list(range(30))
    core.stop()
    core.clock.advance(5 * 60_000)
    core.start()  # the time in which nobody could read is no age
    assert numbers(core, "after-a-start", "events") == list(range(20, 30))
    core.advance(5 * 60_000)
    assert numbers(core, "much-later", "events") == list(range(25, 30))


def test_a_message_in_flight_outlives_the_retention_of_its_topic(tmp_path: Path) -> None:
    core = on(tmp_path)
    short_lived(core)
    core.send("events", b"00001")
    core.receive("events", "g", invisible_ms=30 * 60_000)
    core.advance(31 * 60_000)
    assert [delivery.attempt for delivery in core.receive("events", "g")] == [2]


@pytest.mark.parametrize("check_points", CheckPoints)
def test_the_committed_offset_stays_where_it_was_when_a_crash_takes_an_expiry_back(
    check_points: CheckPoints,
) -> None:
    """Seeds 300564 and 302400: a check point's record says that nothing before it is open."""
    core = CoreBroker()
    topic = core.topic("orders", queues=1)
    core.group("g", check_points=check_points)
    core.send("orders", b"one")
    (first,) = core.receive("orders", "g", invisible_ms=1_000)  # too short to be buffered
    for body in (b"two", b"three"):
        core.send("orders", body)
    if check_points is CheckPoints.DURABLE:
        core.ack("orders", "g", first.handle)
    core.broker.store.queue(topic.id, 0).raise_minimum(2)
    (third,) = core.receive("orders", "g")
    core.ack("orders", "g", first.handle)
    core.change("orders", "g", third.handle, 60_000)  # now it is a record, too
    place = (core.broker.registry.group("g").id, topic.id, 0)

    def committed() -> int:
        progress = core.broker.table.progress(*place)
        return progress.committed if progress else 0

    assert committed() == 2
    core.start()
    assert core.broker.store.queue(topic.id, 0).min_offset == 0
    assert committed() == 2


def test_a_topic_cannot_ask_for_more_than_the_store_keeps(tmp_path: Path) -> None:
    core = on(tmp_path)
    body = admin.CreateTopicRequest(topic=admin.Topic(name="events", retention_ms=HOUR_MS + 1))
    with pytest.raises(PopmqError, match=r"store\.retention_hours"):
        core.reply(Kind.CREATE_TOPIC, body.SerializeToString())
