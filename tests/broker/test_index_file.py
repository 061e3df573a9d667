"""The key index on its disk: what it finds, and what it still finds after every kind of trouble."""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from popmq.broker.index import key_index as key_index_module
from popmq.broker.index.index_file import IndexFile
from popmq.broker.index.key_index import KeyIndex
from popmq.broker.index.message_keys import ID, KEY, name_hash, names_in
from popmq.broker.log.commit_log import ScannedRecord
from popmq.common.record.message import RecordKind, Stamp, decode_header, encode_message
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.disk.lying_disk import LyingDisk, PowerCut

TOPIC = 64
SIZE = 100
HOUR_MS = 3_600_000


def named(*keys: str, message_id: str = "") -> bytes:
    return api.SystemProperties(keys=keys, message_id=message_id, tag="t").SerializeToString()


@dataclass
class Indexed:
    """A log that is only a list of properties, and the index of it on a disk."""

    disk: LyingDisk = field(default_factory=LyingDisk)
    entries_per_file: int = 32
    log: list[bytes] = field(default_factory=list)
    vouched: int = 0  # everything below was in the index at the last finished checkpoint
    index: KeyIndex = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self, log_start: int = 0) -> None:
        """Open the index and enter what it lacks, as recovery does."""
        self.index = KeyIndex(self.disk, "index", entries_per_file=self.entries_per_file)
        self.index.load(log_start)
        self.loaded_to = self.index.covered
        self.enter_missing()

    def enter_missing(self) -> None:
        for number, properties in enumerate(self.log):
            if number * SIZE >= self.index.covered:
                self.index.add(number * SIZE, SIZE, TOPIC, number * 1000, properties)
                self.index.spill()

    def put(self, *keys: str, message_id: str = "") -> int:
        position = len(self.log) * SIZE
        self.log.append(named(*keys, message_id=message_id))
        self.index.add(position, SIZE, TOPIC, position // SIZE * 1000, self.log[-1])
        return position

    def checkpoint(self) -> None:
        for file in self.index.flush(len(self.log) * SIZE):
            file.sync()
        self.vouched = len(self.log) * SIZE

    def run(self) -> None:
        """Everything that steps and checkpoints would do in time."""
        while self.index.step():
            self.checkpoint()
        self.checkpoint()
        while self.index.step():
            self.checkpoint()

    def found(self, key: str, *, topic: int = TOPIC, kind: int = KEY) -> list[int]:
        return [position for position, _ in self.index.find(topic, kind, key.encode())]

    def names(self) -> list[str]:
        return self.disk.names("index")


def test_a_key_leads_to_its_messages_newest_first() -> None:
    indexed = Indexed()
    positions = [indexed.put("a" if number % 3 else "b") for number in range(200)]
    expected = [position for number, position in enumerate(positions) if number % 3]
    assert indexed.found("a") == expected[::-1]
    indexed.run()
    assert indexed.found("a") == expected[::-1]


def test_ids_and_keys_and_topics_are_told_apart() -> None:
    indexed = Indexed()
    as_key = indexed.put("same")
    as_id = indexed.put(message_id="same")
    assert indexed.found("same") == [as_key]
    assert indexed.found("same", kind=ID) == [as_id]
    assert indexed.found("same", topic=TOPIC + 1) == []


def test_every_key_of_a_message_leads_to_it_whatever_its_letters() -> None:
    indexed = Indexed()
    keys = ("café", "日本", "🐘", "a b")
    position = indexed.put(*keys)
    assert [indexed.found(key) for key in keys] == [[position]] * 4


def test_a_message_without_names_is_covered_and_takes_no_room() -> None:
    indexed = Indexed()
    indexed.put()
    assert indexed.index.covered == SIZE
    assert indexed.index.metrics.entries == 0


@pytest.mark.parametrize(
    "garbage",
    [bytes(120), b"\x12", b"\x12\xff", b"\x12\x05ab", b"\xff" * 40, b"\x13\x14", b"\x12\x01a\x0b"],
)
def test_bytes_that_are_no_protobuf_have_no_names(garbage: bytes) -> None:
    assert names_in(garbage) == []


def test_random_bytes_never_upset_the_scan_for_names() -> None:
    dice = random.Random(20261121)
    for _ in range(5000):
        names_in(dice.randbytes(dice.randrange(60)))


def test_the_scan_finds_what_a_protobuf_parser_finds() -> None:
    properties = api.SystemProperties(
        tag="x" * 300, keys=["k" * 200, "short"], message_id="01AB", body_encoding=api.GZIP
    )
    properties.born_timestamp.FromMilliseconds(1_700_000_000_123)
    properties.message_group = "g" * 20_000
    assert names_in(properties.SerializeToString()) == [
        (KEY, b"k" * 200),
        (KEY, b"short"),
        (ID, b"01AB"),
    ]


def test_equal_hashes_lead_to_the_messages_of_both_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_index_module, "name_hash", lambda topic, kind, name: b"\x07" * 8)
    indexed = Indexed()
    positions = [indexed.put(f"key-{number}") for number in range(100)]
    indexed.run()
    assert indexed.found("key-3") == positions[::-1]


@pytest.mark.more
def test_many_files_become_few_and_everything_is_still_found() -> None:
    indexed = Indexed()
    positions = {f"key-{n}": indexed.put(f"key-{n}", message_id=f"id-{n}") for n in range(6000)}
    indexed.run()
    assert indexed.index.metrics.sealed > 256
    assert len(indexed.names()) < 40
    assert all(indexed.found(key) == [at] for key, at in positions.items())
    assert indexed.found("key-6000") == []


def test_nothing_is_lost_while_files_are_made() -> None:
    indexed = Indexed()
    positions = {f"key-{n}": indexed.put(f"key-{n}") for n in range(800)}
    some = [f"key-{n}" for n in range(0, 800, 61)]
    steps = 0
    while indexed.index.step():
        steps += 1
        if steps % 50 == 0:
            indexed.checkpoint()
        if steps % 5 == 0:
            assert all(indexed.found(key) == [positions[key]] for key in some)


def test_only_pieces_of_the_wanted_time_are_read() -> None:
    indexed = Indexed()
    positions = [indexed.put("a") for _ in range(320)]
    indexed.run()
    late = indexed.index.find(TOPIC, KEY, b"a", begin_ms=300_000)
    assert [position for position, _ in late][-1] >= positions[256]
    assert list(indexed.index.find(TOPIC, KEY, b"a", begin_ms=HOUR_MS)) == []


def test_after_a_clean_stop_nothing_is_entered_again() -> None:
    indexed = Indexed()
    for number in range(1000):
        indexed.put(f"key-{number % 7}")
    before = indexed.found("key-3")
    indexed.run()
    indexed.index.close()
    indexed.start()
    assert indexed.loaded_to == 1000 * SIZE
    assert indexed.found("key-3") == before


@pytest.mark.parametrize(
    ("after", "every"),
    [
        pytest.param(LyingDisk.restore_power, 61, id="power cut"),
        pytest.param(LyingDisk.survive, 121, id="kill"),
        pytest.param(LyingDisk.restore_power, 5, marks=pytest.mark.more, id="power cut, often"),
        pytest.param(LyingDisk.survive, 11, marks=pytest.mark.more, id="kill, often"),
    ],
)
def test_after_a_stop_at_any_moment_everything_is_found(
    after: Callable[[LyingDisk], None], every: int
) -> None:
    whole = Indexed(entries_per_file=8)
    fill(whole)
    for cut in range(0, whole.disk.operations, every):
        indexed = Indexed(entries_per_file=8)
        indexed.disk.cut_at(cut)
        with suppress(PowerCut):
            fill(indexed)
        after(indexed.disk)
        indexed.log = whole.log
        indexed.start()
        assert indexed.loaded_to >= indexed.vouched, cut
        expected = [n * SIZE for n in range(len(whole.log)) if n % 5 == 2][::-1]
        assert indexed.found("key-2") == expected, cut


def fill(indexed: Indexed) -> None:
    """400 messages with steps and checkpoints in between: files are made and merged."""
    for number in range(400):
        indexed.put(f"key-{number % 5}")
        indexed.index.step()
        if number % 50 == 49:
            indexed.checkpoint()
    indexed.run()


def test_a_flipped_bit_in_the_tail_ends_what_is_trusted_there() -> None:
    indexed = Indexed(entries_per_file=1000)
    for number in range(30):
        indexed.put(f"key-{number}")
        if number % 10 == 9:
            indexed.checkpoint()
    (name,) = indexed.names()
    file = indexed.disk.open(f"index/{name}")
    at = file.size() // 2
    file.write(bytes([file.read(1, at)[0] ^ 4]), at)
    indexed.index.close()
    indexed.start()
    assert indexed.loaded_to == 10 * SIZE
    assert [indexed.found(f"key-{number}") for number in range(30)] == [
        [number * SIZE] for number in range(30)
    ]


def lose_oldest(indexed: Indexed) -> None:
    indexed.disk.remove(f"index/{indexed.names()[0]}")


def lose_middle(indexed: Indexed) -> None:
    indexed.disk.remove(f"index/{indexed.names()[len(indexed.names()) // 2]}")


def lose_newest(indexed: Indexed) -> None:
    indexed.disk.remove(f"index/{indexed.names()[-1]}")


def lose_all(indexed: Indexed) -> None:
    for name in indexed.names():
        indexed.disk.remove(f"index/{name}")


def garble_headers(indexed: Indexed) -> None:
    for name in indexed.names():
        indexed.disk.open(f"index/{name}").write(b"\x55" * 8, 30)


def shorten_all(indexed: Indexed) -> None:
    for name in indexed.names():
        file = indexed.disk.open(f"index/{name}")
        file.truncate(file.size() // 3)


def add_strangers(indexed: Indexed) -> None:
    names = (f"{7:020d}.8", f"{7:020d}.tail", f"{0:020d}.8.new", "notes.txt", f"{9:020d}.99")
    for name in names:
        indexed.disk.open(f"index/{name}", create=True).write(b"popmqidx" + bytes(100), 0)


@pytest.mark.more
@pytest.mark.parametrize(
    "trouble",
    [lose_oldest, lose_middle, lose_newest, lose_all, garble_headers, shorten_all, add_strangers],
)
def test_lost_and_damaged_files_are_built_again_from_the_log(
    trouble: Callable[[Indexed], None],
) -> None:
    indexed = Indexed()
    for number in range(1000):
        indexed.put(f"key-{number % 7}")
    before = indexed.found("key-3")
    indexed.run()
    indexed.index.close()
    trouble(indexed)
    indexed.start()
    assert indexed.found("key-3") == before
    indexed.run()
    assert indexed.found("key-3") == before


def test_damage_found_by_a_lookup_deletes_the_file_and_a_restart_builds_it_again() -> None:
    indexed = Indexed()
    for number in range(100):
        indexed.put(f"key-{number}")
    indexed.run()
    name = indexed.names()[0]
    file = indexed.disk.open(f"index/{name}")
    size = file.size()
    entries = IndexFile(indexed.disk, f"index/{name}").count * 24
    file.write(b"\xaa" * entries, size - entries)
    assert indexed.found("key-0") == []
    assert indexed.index.has_hole
    assert name not in indexed.names()
    indexed.index.close()
    indexed.start()
    assert indexed.found("key-0") == [0]
    assert not indexed.index.has_hole


def test_files_below_the_start_of_the_log_are_deleted_and_the_rest_still_loads() -> None:
    indexed = Indexed()
    for number in range(1000):
        indexed.put(f"key-{number % 7}")
    indexed.run()
    before = len(indexed.names())
    start = 700 * SIZE
    indexed.index.drop_below(start)
    indexed.run()
    assert len(indexed.names()) < before
    kept = [position for position in range(0, 1000 * SIZE, SIZE) if position >= start]
    expected = [position for position in kept if position // SIZE % 7 == 3][::-1]
    assert indexed.found("key-3") == expected
    indexed.index.close()
    indexed.start(log_start=start)
    assert indexed.loaded_to == 1000 * SIZE
    assert indexed.found("key-3") == expected


def test_an_index_that_knows_more_than_the_log_is_cut_and_filled_again() -> None:
    indexed = Indexed()
    for number in range(500):
        indexed.put(f"key-{number % 7}")
    indexed.run()
    del indexed.log[321:]
    assert indexed.index.truncate(321 * SIZE)
    indexed.enter_missing()
    assert indexed.index.covered == 321 * SIZE
    other = [indexed.put("other") for _ in range(100)]
    assert indexed.found("other") == other[::-1]
    assert indexed.found("key-3") == [n * SIZE for n in range(321) if n % 7 == 3][::-1]
    assert not indexed.index.truncate(421 * SIZE)


def test_a_message_is_found_once_it_is_confirmed() -> None:
    index = Indexed().index
    for number in range(4):
        index.expect(number * SIZE, SIZE, TOPIC, 0, named("a"))
    index.advance(2 * SIZE - 1)
    assert [position for position, _ in index.find(TOPIC, KEY, b"a")] == [0]
    index.advance(4 * SIZE)
    assert [position for position, _ in index.find(TOPIC, KEY, b"a")] == [300, 200, 100, 0]


def test_a_message_that_comes_again_is_entered_once() -> None:
    indexed = Indexed()
    position = indexed.put("a")
    indexed.index.add(position, SIZE, TOPIC, 0, named("a"))
    assert indexed.found("a") == [position]


def test_hashes_do_not_change_between_builds() -> None:
    assert name_hash(64, KEY, b"order-1").hex() == name_hash(64, KEY, b"order-1").hex()
    assert name_hash(64, KEY, b"order-1") != name_hash(64, ID, b"order-1")
    assert name_hash(1, KEY, b"\x02x") != name_hash(1 << 8 | 2, KEY, b"x")


def test_a_message_that_retention_moved_is_found_at_both_places() -> None:
    indexed = Indexed()
    for position, kind in ((0, RecordKind.MESSAGE), (500, RecordKind.MOVED)):
        data = encode_message(
            stamp=Stamp(epoch=1, log_ms=1, wall_ms=1),
            position=position,
            topic_id=TOPIC,
            queue_id=0,
            queue_offset=0,
            tag_hash=0,
            head=b"",
            properties=named("a"),
            kind=kind,
        )
        indexed.index.enter(ScannedRecord(decode_header(data), data))
    assert indexed.found("a") == [500, 0]
    indexed.index.drop_below(100)
    indexed.run()
    assert indexed.found("a") == [500]
