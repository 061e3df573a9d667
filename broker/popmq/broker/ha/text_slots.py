"""Small files of lines that can be written while the disk is full.

A file has two slots of the same size, both with all lines, and their blocks are its own:

    popmq <kind> 2 <counter> <bytes of text> <crc32c of counter, space and text, hex>
    <field> <field> ...

Behind the text a slot has zeros, or what is left of a longer text. A change is written to one
slot, then to the other, each with its own sync: whatever a crash or a damaged block leaves of one,
the other is whole. Of two whole slots that with the higher counter counts. An older popmq wrote
one text without slots (`popmq <kind> 1 <crc32c>`); it is replaced at the first start.
"""

import logging
from collections.abc import Iterable, Sequence

from crc32c import crc32c

from popmq.common.disk import Disk, DiskFile, write_atomically
from popmq.common.errors import StoreDamaged

logger = logging.getLogger(__name__)


class TextSlots:
    """The file at `path`; `slot_bytes` is the limit of its text with the first line."""

    def __init__(self, disk: Disk, path: str, kind: str, slot_bytes: int) -> None:
        self._disk = disk
        self._path = path
        self._kind = kind
        self._slot_bytes = slot_bytes
        self._counter = 0
        self._order = (0, 1)  # the slot that may be lost is written first
        self._has_slots = False
        self._old: bytes | None = None  # text of an older popmq
        self._file: DiskFile | None = None

    def read(self) -> list[list[str]] | None:
        """The fields of each line; None when there is no file. StoreDamaged for anything else."""
        try:
            file = self._disk.open(self._path)
        except FileNotFoundError:
            return None
        try:
            data = file.read(file.size(), 0)
        finally:
            file.close()
        text = self._old = self._old_text(data)
        if text is None:
            text = self._newest_text(data)
        return [line.split(" ") for line in text.decode().splitlines()]

    def write(self, lines: Iterable[Sequence[object]]) -> None:
        """Durable when this returns; after a crash the file has the old lines or the new ones.

        OSError: the old ones still count.
        """
        text = "".join(" ".join(map(str, line)) + "\n" for line in lines).encode()
        slot = self._encode(self._counter + 1, text)
        if not self._has_slots:
            self._make(slot)
            return
        first, second = self._order
        file = self._file = self._file or self._disk.open(self._path)
        file.write(slot, first * self._slot_bytes)
        file.sync()
        self._counter += 1
        try:
            file.write(slot, second * self._slot_bytes)
            file.sync()
        except OSError as error:  # one slot is enough, and the next change mends the other
            self._order = (second, first)
            logger.error("half written", extra={"path": self._path, "reason": str(error)})

    def open(self) -> None:
        """Keep the file open for the next change, which then needs no descriptor."""
        if self._has_slots and self._file is None:
            self._file = self._disk.open(self._path)

    def close(self) -> None:
        """The next change opens the file again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _make(self, slot: bytes) -> None:
        """All blocks are written once, so that they are there when the disk is full."""
        self.close()
        write_atomically(self._disk, self._path, 2 * slot.ljust(self._slot_bytes, b"\0"))
        self._counter += 1
        self._has_slots, self._old = True, None

    def _encode(self, counter: int, text: bytes) -> bytes:
        check = crc32c(b"%d %b" % (counter, text))
        head = f"popmq {self._kind} 2 {counter} {len(text)} {check:08x}\n".encode()
        assert len(head) + len(text) <= self._slot_bytes, f"{len(text)} bytes for {self._path}"
        return head + text

    def _old_text(self, data: bytes) -> bytes | None:
        head, _, text = data.partition(b"\n")
        return text if head == f"popmq {self._kind} 1 {crc32c(text):08x}".encode() else None

    def upgrade(self) -> None:
        """Give slots to a file of an older popmq, whose lines were read."""
        if self._old is None:
            return
        try:
            self._make(self._encode(self._counter + 1, self._old))
        except OSError as error:  # the disk is full: the old file is good until the first change
            logger.warning("not replaced", extra={"path": self._path, "reason": str(error)})

    def _newest_text(self, data: bytes) -> bytes:
        slots = [self._decode(data[at:]) for at in (0, self._slot_bytes)]
        newest = max(slots, key=lambda slot: slot[0])
        if newest[0] < 0:
            raise StoreDamaged(
                f"{self._path} is damaged: restore it from a copy, or remove the whole data "
                "directory so that this broker starts as a new, empty one and copies from its "
                "master"
            )
        self._counter, text = newest
        self._order = (0, 1) if slots[1] == newest else (1, 0)
        self._has_slots = True
        return text

    def _decode(self, data: bytes) -> tuple[int, bytes]:
        """Counter and text of a slot; -1 for one that is not whole."""
        head, _, rest = data[: self._slot_bytes].partition(b"\n")
        try:
            name, kind, version, counter, size, check = head.decode().split(" ")
            text = rest[: int(size)]
            whole = (name, kind, version) == ("popmq", self._kind, "2")
            whole = whole and len(text) == int(size)
            whole = whole and crc32c(b"%d %b" % (int(counter), text)) == int(check, 16)
            return (int(counter), text) if whole else (-1, b"")
        except ValueError:
            return -1, b""
