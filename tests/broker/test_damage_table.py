"""Every damage at every place: all is there, or the start is refused with a way out.

Makes the table of docs/reference/damages.md.  A variant is one damage at one place;
POPMQ_DAMAGE_STRIDE says how far apart the flipped bytes are (1: every byte), POPMQ_DAMAGE_SEED
repeats a run.
"""

import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from popmq.common.errors import Code, StoreDamaged
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind, PutEntry, PutRequest
from popmq.common.record.message import HEADER_SIZE, check_record
from popmq.common.settings.settings import MessageSettings, Settings, StoreSettings, TimerSettings
from popmq.common.topics import MessageType
from popmq.testing.disk.lying_disk import LyingDisk, PowerCut
from popmq.testing.harness.core_broker import CoreBroker

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "damages.md"
STRIDE = int(os.environ.get("POPMQ_DAMAGE_STRIDE", "199"))
SEED = int(os.environ.get("POPMQ_DAMAGE_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
SETTINGS = Settings(
    store=StoreSettings(segment_bytes=16 << 10, snapshot_bytes=6 << 10, reserved_segments=1),
    message=MessageSettings(max_body_bytes=2048, max_properties_bytes=64),
    timer=TimerSettings(wheel_slots=60, log_segment_bytes=16 << 10),
)
DATA = SETTINGS.broker.data
LOG, KEYS, SNAPSHOT = f"{DATA}/commitlog/", f"{DATA}/index/", f"{DATA}/snapshot/"
INDEX = (f"{DATA}/consumequeue/", f"{DATA}/system/")
CHECKPOINT = f"{DATA}/checkpoint"
TOPICS = ("orders", "bills")
SEARCHED = 7  # each so-many-th message is looked for by its id

ALL = "all is there"
COUNTED = "all but the damaged record, which is counted"
TAKEN = "taken for retention: what it held is gone"
REFUSED = "refused"
# What an error has to say besides: the file, and what to do.
NAMES = re.compile(rf"{DATA}/[\w/]+")
WAY_OUT = re.compile(r"popmq doctor|from a copy|move it away|set it back")

Files = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Made:
    """A store, and what its clients were told."""

    files: Files
    sent: frozenset[bytes] = frozenset()  # answered OK
    acked: frozenset[bytes] = frozenset()  # by the group "worker"
    unanswered: frozenset[bytes] = frozenset()
    earlier: "Made | None" = None


@dataclass(slots=True)
class Client:
    core: CoreBroker
    sent: set[bytes] = field(default_factory=set)
    acked: set[bytes] = field(default_factory=set)

    def send(self, numbers: range) -> None:
        for number in numbers:
            for topic in TOPICS:
                reply = self.core.reply(Kind.PUT, put(topic, number))
                assert hop.decode_put_reply(reply)[0].code == Code.OK
                self.sent.add(body(topic, number))

    def work(self, count: int) -> None:
        """Receive some, and ack every second one."""
        got = self.core.receive("orders", "worker", limit=count, invisible_ms=3_600_000)
        for delivery in got[::2]:
            assert self.core.ack("orders", "worker", delivery.handle)[0].code == Code.OK
            self.acked.add(delivery.head)

    def made(self, *unanswered: bytes, earlier: Made | None = None) -> Made:
        return Made(
            files_of(self.core.disk),
            frozenset(self.sent),
            frozenset(self.acked),
            frozenset(unanswered),
            earlier,
        )


def body(topic: str, number: int) -> bytes:
    return b"%s-%03d-" % (topic.encode(), number) + b"x" * 150


def name_of(head: bytes) -> bytes:
    return head[:10].ljust(32, b"-")


def put(topic: str, number: int) -> bytes:
    head = body(topic, number)
    entry = PutEntry(MessageType.NORMAL, head, b"\x1a\x20" + name_of(head), 0, number % 2)
    return hop.encode_put(PutRequest(topic, [entry]))


def files_of(disk: object) -> Files:
    assert isinstance(disk, LyingDisk)
    return {path: bytes(content.now) for path, content in sorted(disk._files.items())}


def disk_of(files: Files) -> LyingDisk:
    """All of it durable."""
    disk = LyingDisk()
    for path, data in files.items():
        file = disk.open(path, create=True)
        file.write(data, 0)
        file.sync()
        disk.sync_folder(path.rpartition("/")[0])
    return disk


def made_store(*, clean: bool) -> Made:
    """Several segments, checkpoint and snapshots in the middle of a killed store and at the end of
    one that was stopped; the last record of a killed one was on the disk and not answered yet."""
    core = CoreBroker(settings=SETTINGS)
    for topic in TOPICS:
        core.topic(topic, queues=2)
    core.group("worker")
    client = Client(core)
    client.send(range(40))
    client.work(8)
    core.advance(11_000)  # a checkpoint
    earlier = client.made()
    client.send(range(40, 50))
    core.advance(11_000)
    client.send(range(50, 60))
    client.work(4)
    if clean:
        core.stop()
        return client.made(earlier=earlier)
    core.ask(Kind.PUT, put("orders", 60), settle=False)
    last = body("orders", 60)
    while not any(last in data for data in files_of(core.disk).values()):
        core.tick()
    return client.made(last, earlier=earlier)


# -- damages: each yields the files of its variants, and whose clients are asked afterwards

Variants = Iterator[tuple[Files, Made]]


def of(prepared: Made, *roots: str) -> list[str]:
    return [path for path in prepared.files if path.startswith(roots)]


def without(prepared: Made, *roots: str) -> Files:
    return {path: data for path, data in prepared.files.items() if not path.startswith(roots)}


def nothing(prepared: Made) -> Variants:
    yield prepared.files, prepared


def cut_in_the_last_record(prepared: Made) -> Variants:
    """The file itself ends there."""
    path, first, end = last_record(prepared.files)
    for at in range(first, end):
        yield {**prepared.files, path: prepared.files[path][:at]}, prepared


def last_record(files: Files) -> tuple[str, int, int]:
    at = first = 0
    path = result = ""
    for path in sorted(path for path in files if path.startswith(LOG)):
        data, start = files[path], int(path.rpartition("/")[2])
        offset = 0
        while len(data) - offset >= HEADER_SIZE and any(data[offset : offset + 8]):
            size = check_record(data, offset, start + offset).size
            result, first, at = path, offset, offset + size
            offset += size
    return result, first, at


def flipped(*roots: str) -> Callable[[Made], Variants]:
    """A bit of every STRIDE-th byte, and of some zeros behind the last one."""

    def damage(prepared: Made) -> Variants:
        rng = random.Random(SEED)
        for path in of(prepared, *roots):
            data = prepared.files[path]
            used = min(len(data), len(data.rstrip(b"\0")) + 200)
            for at in range(rng.randrange(min(STRIDE, max(1, used))), used, STRIDE):
                wrong = bytearray(data)
                wrong[at] ^= 1 << rng.randrange(8)
                yield {**prepared.files, path: bytes(wrong)}, prepared

    return damage


def missing(*roots: str) -> Callable[[Made], Variants]:
    """All of it, and each file by itself."""

    def damage(prepared: Made) -> Variants:
        yield without(prepared, *roots), prepared
        for path in of(prepared, *roots):
            yield without(prepared, path), prepared

    return damage


def oldest_missing(*more: str) -> Callable[[Made], Variants]:
    """What people do who need room."""

    def damage(prepared: Made) -> Variants:
        yield without(prepared, of(prepared, LOG)[0], *more), prepared

    return damage


def segment_missing(prepared: Made) -> Variants:
    """Each that holds a record but the first."""
    for path in of(prepared, LOG)[1:-1]:
        yield without(prepared, path), prepared


def stale(*roots: str) -> Callable[[Made], Variants]:
    """As it was before: somebody copied it back."""

    def damage(prepared: Made) -> Variants:
        assert prepared.earlier is not None
        old = {path: prepared.earlier.files[path] for path in of(prepared.earlier, *roots)}
        yield {**without(prepared, *roots), **old}, prepared

    return damage


def ahead(*roots: str) -> Callable[[Made], Variants]:
    """The log is that of before, and these files know of more."""

    def damage(prepared: Made) -> Variants:
        assert prepared.earlier is not None
        new = {path: prepared.files[path] for path in of(prepared, *roots)}
        yield {**without(prepared.earlier, *roots), **new}, prepared.earlier

    return damage


def two_crashes_in_a_start(prepared: Made) -> Variants:
    """The power goes at each operation of a start, and at some of the next one; with the index
    as it is, and without one."""
    rebuilt = without(prepared, *INDEX, KEYS)
    for files, second in ((prepared.files, 0), (rebuilt, 1), (rebuilt, 9)):
        operations, whole = 0, False
        while not whole:
            disk = disk_of(files)
            whole = started(disk, operations)
            disk.restore_power()
            started(disk, second)
            disk.restore_power()
            yield files_of(disk), prepared
            operations += 1


def started(disk: LyingDisk, operations: int) -> bool:
    """Whether a start came to its end before the power went."""
    disk.cut_at(operations)
    with suppress(PowerCut):
        CoreBroker(disk=disk, settings=SETTINGS)
        return True
    return False


@dataclass(frozen=True, slots=True)
class Damage:
    name: str
    variants: Callable[[Made], Variants]
    killed: tuple[str, ...] = (ALL,)
    stopped: tuple[str, ...] = (ALL,)

    def __str__(self) -> str:
        return self.name


DAMAGES = (
    Damage("none", nothing),
    Damage(
        "the last segment cut at each byte of its last record",
        cut_in_the_last_record,
        stopped=(REFUSED,),
    ),
    Damage(
        "a byte of the log flipped",
        flipped(LOG),
        killed=(ALL, COUNTED, REFUSED),
        stopped=(ALL, COUNTED, REFUSED),
    ),
    Damage("a byte of the consume queues flipped", flipped(*INDEX)),
    Damage("a byte of the key index flipped", flipped(KEYS)),
    Damage("a byte of the checkpoint flipped", flipped(CHECKPOINT)),
    Damage("a byte of a snapshot flipped", flipped(SNAPSHOT)),
    Damage("a byte of abort flipped", flipped(f"{DATA}/abort")),
    Damage("a byte of the timers' files flipped", flipped(f"{DATA}/timer")),
    Damage("the oldest segment missing", oldest_missing(), (REFUSED,), (REFUSED,)),
    Damage(
        "the oldest segment and the checkpoint missing",
        oldest_missing(CHECKPOINT),
        (TAKEN,),
        (TAKEN,),
    ),
    Damage("another segment missing", segment_missing, (REFUSED,), (REFUSED,)),
    Damage("consume queues missing", missing(*INDEX)),
    Damage("the key index missing", missing(KEYS)),
    Damage("the checkpoint missing", missing(CHECKPOINT)),
    Damage("snapshots missing", missing(SNAPSHOT)),
    Damage("everything but the log missing", missing(*INDEX, KEYS, CHECKPOINT, SNAPSHOT)),
    Damage("stale consume queues", stale(*INDEX)),
    Damage("a stale key index", stale(KEYS)),
    Damage("a stale checkpoint", stale(CHECKPOINT)),
    Damage("stale snapshots", stale(SNAPSHOT)),
    Damage("everything but the log stale", stale(*INDEX, KEYS, CHECKPOINT, SNAPSHOT)),
    Damage("consume queues ahead of the log", ahead(*INDEX)),
    Damage("the key index ahead of the log", ahead(KEYS)),
    Damage("snapshots ahead of the log", ahead(SNAPSHOT)),
    Damage("the checkpoint ahead of the log", ahead(CHECKPOINT), (REFUSED,), (REFUSED,)),
    Damage("two power cuts in a row while it starts", two_crashes_in_a_start),
)


@pytest.fixture(scope="module")
def stores() -> dict[bool, Made]:
    return {clean: made_store(clean=clean) for clean in (False, True)}


MANY_PLACES = (
    "the last segment cut at each byte of its last record",
    "a byte of the log flipped",
    "two power cuts in a row while it starts",
)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(
            damage, id=damage.name, marks=[pytest.mark.more] if damage.name in MANY_PLACES else []
        )
        for damage in DAMAGES
    ],
)
def test_after_any_damage_all_is_there_or_the_start_is_refused_with_a_way_out(
    damage: Damage, stores: dict[bool, Made]
) -> None:
    cells = []
    for clean, expected in ((False, damage.killed), (True, damage.stopped)):
        result: dict[str, int] = {}
        for files, variant in damage.variants(stores[clean]):
            outcome = outcome_of(files, variant)
            result[outcome] = result.get(outcome, 0) + 1
        assert set(result) <= set(expected), f"seed {SEED}: {result}"
        # Which bytes are flipped is up to the seed; of the others each outcome was seen.
        assert damage.name.endswith(" flipped") or set(result) == set(expected), result
        cells.append("; ".join(expected))
        print(f"{damage}, {'stopped' if clean else 'killed'}, seed {SEED}: {result}")
    row = f"| {damage} | {cells[0]} | {cells[1]} |"
    assert row in PAGE.read_text(encoding="utf-8"), f"not in {PAGE.name}: {row}"


def outcome_of(files: Files, prepared: Made) -> str:
    """What a start comes to; fails when it is none of those that are allowed."""
    disk = disk_of(files)
    try:
        core = CoreBroker(disk=disk, settings=SETTINGS)
    except StoreDamaged as refusal:
        text = str(refusal)
        assert NAMES.search(text), text
        assert WAY_OUT.search(text), text
        assert "position" in text or re.search(r"/\d{20}", text), text
        now = files_of(disk)
        assert {path: now[path] for path in now if path.startswith(LOG)} == {
            path: data for path, data in files.items() if path.startswith(LOG)
        }, "refused, and the log was changed"
        return REFUSED
    lost = prepared.sent - read_all(core, prepared, "fresh")
    cut = core.broker.store.start > 0
    if cut:
        gone = b"".join(prepared.files[path] for path in of(prepared, LOG) if path not in files)
        assert all(head in gone for head in lost), "more is gone than it held"
    elif lost:
        assert len(lost) == 1, f"{len(lost)} messages are gone"
        assert core.broker.store.reader.damaged > 0, f"{lost} is gone and nobody says so"
    for head in sorted(prepared.sent - lost)[::SEARCHED]:
        assert_found(core, head)
    mine = {delivery.head for delivery in everything(core, "orders", "worker")}
    assert not mine & prepared.acked, "what was acked came again"
    # And it goes on, over another start.
    new = body("orders", 999)
    reply = core.reply(Kind.PUT, put("orders", 999))
    assert hop.decode_put_reply(reply)[0].code == Code.OK
    core.broker.release_files()
    core.start()
    again = {delivery.head for topic in TOPICS for delivery in everything(core, topic, "later")}
    assert again >= (prepared.sent - lost) | {new}
    return TAKEN if cut else COUNTED if lost else ALL


def read_all(core: CoreBroker, prepared: Made, group: str) -> set[bytes]:
    heads = [delivery.head for topic in TOPICS for delivery in everything(core, topic, group)]
    assert len(heads) == len(set(heads)), "a message came twice"
    assert set(heads) <= prepared.sent | prepared.unanswered, "something came that nobody sent"
    return set(heads)


def everything(core: CoreBroker, topic: str, group: str) -> Iterator[Delivery]:
    while batch := core.receive(topic, group):
        yield from batch


def assert_found(core: CoreBroker, head: bytes) -> None:
    topic = core.broker.registry.topic(head.partition(b"-")[0].decode())
    result = core.broker.lookup.by_id(topic.id, name_of(head).decode())
    assert [message.head for message in result.messages] == [head], head[:10]
