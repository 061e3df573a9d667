"""What can happen to a data directory, each as a function of its folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from popmq.broker.log.store_checkpoint import StoreCheckpoint
from popmq.common.record.message import RecordKind, check_record


def log_records(folder: Path) -> Iterator[tuple[Path, int, int, int]]:
    """File, first byte, size and kind of each record of an undamaged log."""
    for file in sorted((folder / "commitlog").iterdir()):
        data = file.read_bytes()
        at = 0
        while len(data) - at >= 56 and any(data[at : at + 8]):
            header = check_record(data, at, int(file.name) + at)
            yield file, at, header.size, header.kind
            at += header.size


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 0x40]))


def messages(folder: Path) -> list[tuple[Path, int, int]]:
    result = log_records(folder)
    return [(file, at, size) for file, at, size, kind in result if kind == RecordKind.MESSAGE]


def log_end(folder: Path) -> tuple[Path, int]:
    *_, (file, at, size, _) = log_records(folder)
    return file, at + size


def nothing(folder: Path) -> None:
    return


def torn_tail(folder: Path) -> None:
    file, at, size, _ = list(log_records(folder))[-1]
    with file.open("r+b") as opened:
        opened.seek(at + size - 20)
        opened.write(bytes(20))


def file_ends_in_a_header(folder: Path) -> None:
    """Of the last record; its size can still be read."""
    file, at, _, _ = list(log_records(folder))[-1]
    with file.open("r+b") as opened:
        opened.truncate(at + 6)


def garbage_behind_the_end(folder: Path) -> None:
    file, end = log_end(folder)
    with file.open("r+b") as opened:
        opened.seek(end + 5000)
        opened.write(b"\x55" * 300)


def flip_last_but_three(folder: Path) -> None:
    file, at, _ = messages(folder)[-4]
    flip(file, at + 100)


def flip_first_message(folder: Path) -> None:
    file, at, _ = messages(folder)[3]
    flip(file, at + 100)


def remove_first_segment(folder: Path) -> None:
    min((folder / "commitlog").iterdir()).unlink()


def remove_middle_segment(folder: Path) -> None:
    sorted((folder / "commitlog").iterdir())[1].unlink()


def padding_size(folder: Path) -> None:
    file, at = next((f, at) for f, at, _, kind in log_records(folder) if kind == RecordKind.PADDING)
    flip(file, at + 2)


def foreign_file(folder: Path) -> None:
    (folder / "commitlog" / "notes.txt").write_text("hello")


def no_checkpoint(folder: Path) -> None:
    (folder / "checkpoint").unlink()


def garbled_checkpoint(folder: Path) -> None:
    (folder / "checkpoint").write_bytes(b"popmqckp" + b"\xff" * 32)


def checkpoint_between_records(folder: Path) -> None:
    (folder / "checkpoint").write_bytes(StoreCheckpoint(100_001, 1, 1).encode())


def units_file(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("consumequeue/orders@*/0/*"))))


def shortened_units(folder: Path) -> None:
    file = units_file(folder)
    file.write_bytes(file.read_bytes()[:-33])


def wrong_unit(folder: Path) -> None:
    flip(units_file(folder), 2 * 20 + 7)


def wrong_unit_and_hole(folder: Path) -> None:
    wrong_unit(folder)
    file, end = log_end(folder)
    flip(file, end - 20)


def wrong_tag(folder: Path) -> None:
    flip(units_file(folder), 2 * 20 + 15)


def unit_of_its_neighbour(folder: Path) -> None:
    file = units_file(folder)
    data = file.read_bytes()
    file.write_bytes(data[:40] + data[60:80] + data[60:])


def units_of_another_queue(folder: Path) -> None:
    """Of the other topic, in the same number."""
    path, other = (
        next(file for file in sorted(folder.glob(f"consumequeue/{name}@*/0/*")))
        for name in ("orders", "other")
    )
    path.write_bytes(other.read_bytes()[: path.stat().st_size])


def doubled_unit(folder: Path) -> None:
    file = units_file(folder)
    data = file.read_bytes()
    file.write_bytes(data + data[-20:])


def wrong_revive_unit(folder: Path) -> None:
    file = next(path for path in sorted(folder.glob("system/*REVIVE*/*/*")) if path.stat().st_size)
    flip(file, 70)


def no_index_at_all(folder: Path) -> None:
    for name in ("consumequeue", "system"):
        shutil.rmtree(folder / name)


def odd_file_in_a_queue(folder: Path) -> None:
    (units_file(folder).parent / "copy of units").write_bytes(b"x")


def queue_of_a_stranger(folder: Path) -> None:
    shutil.copytree(units_file(folder).parent, folder / "consumequeue" / "gone@900" / "0")


def damaged_snapshot(folder: Path) -> None:
    flip(sorted((folder / "snapshot").iterdir())[-1], 60)
