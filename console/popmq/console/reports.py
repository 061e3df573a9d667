"""The HTML pages of `popmq report`, of a folder or of a web server (the setting console.reports).

Of a folder only its own files are listed and read: no path, no link, no hidden name.
"""

import os
import stat
from dataclasses import dataclass
from html.parser import HTMLParser
from urllib.parse import quote, unquote

from popmq.common.errors import Code, Refused, Unavailable
from popmq.console.fetches import Fetches

SHOWN = 50
MAX_BYTES = 64 << 20
_NO_LINK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class ReportFile:
    name: str
    size: int = -1  # not known of a web server's
    made_ms: int = 0
    url: str = ""  # where it is; empty: in the folder


class Reports:
    def __init__(self, place: str, fetches: Fetches) -> None:
        self.place = place
        self.is_url = "://" in place
        self._fetches = fetches

    def last(self) -> list[ReportFile]:
        """The newest first; of a web server in the order of its list.  Raises Unavailable."""
        return self._of_server() if self.is_url else self._of_folder()

    def read(self, name: str) -> bytes:
        """Raises NOT_FOUND for what is no report of the folder."""
        missing = Refused(Code.NOT_FOUND, f"there is no report {name[:80]!r}")
        if self.is_url or not _is_name(name):
            raise missing
        try:
            descriptor = self._opened(name)
        except OSError:
            raise missing from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise missing
            if status.st_size > MAX_BYTES:
                raise Refused(
                    Code.BAD_REQUEST, f"the report has {status.st_size} bytes, over {MAX_BYTES}"
                )
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(MAX_BYTES)
        finally:
            os.close(descriptor)

    def _opened(self, name: str) -> int:
        folder = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return os.open(name, _NO_LINK, dir_fd=folder)
        finally:
            os.close(folder)

    def _of_folder(self) -> list[ReportFile]:
        files = []
        try:
            with os.scandir(self.place) as entries:
                for entry in entries:
                    if _is_name(entry.name) and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        made_ms = status.st_mtime_ns // 1_000_000
                        files.append(ReportFile(entry.name, status.st_size, made_ms))
        except OSError as error:
            raise Unavailable(
                f"the folder of console.reports cannot be read: {self.place}: {error.strerror}"
            ) from error
        return sorted(files, key=lambda file: (-file.made_ms, file.name))[:SHOWN]

    def _of_server(self) -> list[ReportFile]:
        try:
            content = self._fetches.start(self.place).answer()
        except Unavailable as error:
            raise Unavailable(f"{self.place} (console.reports): {error}") from error
        links = _Links()
        links.feed(content.decode(errors="replace"))
        names = [name for name in dict.fromkeys(map(unquote, links.targets)) if _is_name(name)]
        base = self.place.rstrip("/")
        return [ReportFile(name, url=f"{base}/{quote(name, safe='')}") for name in names[:SHOWN]]


def _is_name(name: str) -> bool:
    """Of a file of the folder itself, and text that a URL can hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return name.endswith(".html") and not name.startswith(".") and not {"/", "\0"} & {*name}


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.targets += [value for name, value in attrs if name == "href" and value]
