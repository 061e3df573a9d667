"""Small files of lines, with a checksum in the first one, replaced as a whole.

    popmq <kind> 1 <crc32c of what follows, hex>
    <field> <field> ...

A person can read them, and a file that was changed or damaged is not believed.
"""

from collections.abc import Iterable, Sequence

from crc32c import crc32c

from popmq.common.disk import Disk, write_atomically
from popmq.common.errors import StoreDamaged


def write_lines(disk: Disk, path: str, kind: str, lines: Iterable[Sequence[object]]) -> None:
    """Durable when this returns; after a crash it is the old file or the new one."""
    text = "".join(" ".join(map(str, line)) + "\n" for line in lines).encode()
    write_atomically(disk, path, f"popmq {kind} 1 {crc32c(text):08x}\n".encode() + text)


def read_lines(disk: Disk, path: str, kind: str) -> list[list[str]] | None:
    """The lines' fields; None when there is no file. StoreDamaged for anything else."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        data = file.read(file.size(), 0)
    finally:
        file.close()
    head, _, text = data.partition(b"\n")
    if head != f"popmq {kind} 1 {crc32c(text):08x}".encode():
        raise StoreDamaged(
            f"{path} is damaged: restore it from a copy, or remove the whole data directory so "
            "that this broker starts as a new, empty one and copies from its master"
        )
    return [line.split(" ") for line in text.decode().splitlines()]
