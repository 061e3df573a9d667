"""FIFO groups and the store: retention, damage, restarts with and without a snapshot."""

from dataclasses import replace
from pathlib import Path

import pytest
from fifo.cores import attempts, progress

from popmq.broker.deliveries.pop_check_point import UnparkAction
from popmq.broker.persistence.retention import LiveBody
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import PopSettings, StoreSettings
from popmq.common.topics import GroupType, MessageType
from popmq.testing.disk.lying_disk import ResidentDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker, pop

HOUR_MS = 3_600_000
BODY = bytes(50_000)


def on(folder: Path, pop: PopSettings = SMALL.pop) -> CoreBroker:
    settings = replace(
        SMALL,
        pop=pop,
        store=StoreSettings(
            segment_bytes=1 << 20, snapshot_bytes=64 << 10, retention_hours=1, tail_bytes=0
        ),
        broker=replace(SMALL.broker, data=str(folder)),
    )
    core = CoreBroker(disk=ResidentDisk(), settings=settings)
    if core.broker.registry.find_topic("orders") is None:
        core.topic("orders", queues=1, type=MessageType.FIFO)
        core.topic("filler", queues=1)
        core.group("g", type=GroupType.FIFO)
    return core


def fill(core: CoreBroker, count: int) -> None:
    """`count` messages of 50 KB in another topic, one a minute: old segments go."""
    for _ in range(count):
        core.send("filler", BODY)
        core.clock.advance(60_000)
        core.run_steps()


def restart(core: CoreBroker, *, clean: bool) -> None:
    if clean:
        core.stop()
    else:
        core.broker.release_files()
    core.start()


@pytest.mark.parametrize("clean", [True, False])
def test_a_returned_message_outlives_the_retention_and_keeps_its_place_and_attempts(
    tmp_path: Path, clean: bool
) -> None:
    core = on(tmp_path)
    for name in (b"a1", b"a2", b"b1"):
        core.send("orders", name, message_group=name[:1].decode())
    assert attempts(core.receive("orders", "g", limit=2, invisible_ms=1_000)) == [
        ("a1", 1),
        ("a2", 1),
    ]
    core.advance(1_100)
    fill(core, 180)
    assert core.broker.store.retention.deleted_segments > 2
    core.send("orders", b"a3", message_group="a")
    for _ in range(2):
        restart(core, clean=clean)
    assert attempts(core.receive("orders", "g")) == [("a1", 2), ("a2", 2), ("a3", 1)]
    assert core.broker.pop.service.metrics.expired == 1, "b1 was never delivered"


def test_a_returned_message_that_waits_outlives_every_round_of_retention(tmp_path: Path) -> None:
    """Seed 183: the second round took it out of the line, though it was not over."""
    core = on(tmp_path)
    for name in (b"a1", b"a2", b"b1", b"b2"):
        core.send("orders", name, message_group=name[:1].decode())
    first, _ = core.receive("orders", "g", limit=2, invisible_ms=1_000)
    core.change("orders", "g", first.handle, HOUR_MS)
    core.advance(1_100)  # a2 came back, and waits behind a1
    topic = core.broker.registry.topic("orders")
    for minimum in (3, 4):
        core.broker.store.queue(topic.id, 0).raise_minimum(minimum)
        core.receive("orders", "g", invisible_ms=HOUR_MS)
    core.advance(HOUR_MS + 1_000)
    deliveries = core.receive("orders", "g")
    assert attempts(deliveries) == [("a1", 2), ("a2", 2), ("b2", 2)]


def test_a_returned_message_is_delivered_while_retention_moves_it(tmp_path: Path) -> None:
    """Seed 302535: it was read at its new place before that was written, and passed over."""
    core = on(tmp_path)
    core.send("orders", b"a1", message_group="a")
    core.receive("orders", "g", invisible_ms=1_000)
    core.advance(1_100)
    topic = core.broker.registry.topic("orders")
    (unit,) = core.broker.store.queue(topic.id, 0).units(0, 1)
    core.broker.deliveries.bodies.move(LiveBody(topic.id, 0, 0, unit))
    answer = core.ask(Kind.POP, pop("orders", "g"), settle=False)
    core.run_until_idle()
    assert answer.body is not None
    deliveries = list(hop.decode_pop_reply(answer.body).deliveries)
    assert attempts(deliveries) == [("a1", 2)]


def test_a_topic_that_is_deleted_while_retention_looks_for_its_returned_messages_keeps_nothing(
    tmp_path: Path,
) -> None:
    core = on(tmp_path)
    for number in range(96):
        core.send("orders", b"%d" % number, message_group=str(number))
    for _ in range(3):
        core.receive("orders", "g", invisible_ms=1_000)
    core.advance(1_100)
    pieces = core.broker.deliveries.bodies.bodies_below(core.broker.store.end)
    result = 0
    while not result:
        result = len(next(pieces))
    core.broker.registry.delete_topic("orders")
    assert [live_body for piece in pieces for live_body in piece] == []


def test_what_was_never_delivered_expires_and_the_offset_moves_past_it(tmp_path: Path) -> None:
    core = on(tmp_path)
    for name in (b"a1", b"a2"):
        core.send("orders", name, message_group="a")
    (held,) = core.receive("orders", "g", limit=1, invisible_ms=12 * HOUR_MS)
    assert core.receive("orders", "g") == []
    fill(core, 180)
    core.send("orders", b"a3", message_group="a")
    assert core.receive("orders", "g") == [], "a1 is still in flight"
    core.ack("orders", "g", held.handle)
    assert progress(core).committed == 2
    assert attempts(core.receive("orders", "g")) == [("a3", 1)]
    assert core.broker.pop.service.metrics.expired == 1


def test_a_damaged_message_is_passed_over_and_its_message_group_goes_on(tmp_path: Path) -> None:
    core = on(tmp_path)
    for number in range(3):
        core.send("orders", b"damage me %d" % number, message_group="a")
    (log,) = (path for path in (tmp_path / "commitlog").iterdir() if int(path.name) == 0)
    data = log.read_bytes()
    log.write_bytes(data.replace(b"damage me 1", b"damaged me!"))
    first, second = core.receive("orders", "g")
    assert (first.head, second.head) == (b"damage me 0", b"damage me 2")
    core.ack("orders", "g", first.handle, second.handle)
    assert progress(core).committed == 3


def test_parked_messages_outlive_the_retention(tmp_path: Path) -> None:
    core = on(tmp_path, PopSettings(fifo_open_offsets=3, fifo_park_after_ms=1))
    core.send("orders", b"a1", message_group="a")
    (stuck,) = core.receive("orders", "g", invisible_ms=12 * HOUR_MS)
    for number in (2, 3, 4):
        core.send("orders", b"a%d" % number, message_group="a")
    core.advance(10)
    assert core.receive("orders", "g") == []
    core.run_steps()
    assert core.broker.fifo.parking.parked == 2
    fill(core, 180)
    assert core.broker.store.retention.deleted_segments > 2
    restart(core, clean=False)
    core.ack("orders", "g", stuck.handle)
    registry = core.broker.registry
    group, topic = registry.group("g"), registry.topic("orders")
    assert core.broker.fifo.parking.apply_action(group, topic, "a", UnparkAction.RESUME) == 2
    core.run_steps()
    assert attempts(core.receive("orders", "g")) == [("a2", 1), ("a3", 1)]
