"""`popmq up --console-port N`, with the console as a process of its own."""

import http.client
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from console.console_site import Parsed, until
from e2e.processes import LOCAL, Role, free_port, run_command


class UpWithConsole(Role):
    """Enter it to start it; the console answers from then on."""

    def __init__(
        self, folder: Path, *arguments: str, settings: Mapping[str, str] | None = None
    ) -> None:
        self.endpoint, self.console = f"{LOCAL}:{free_port()}", f"{LOCAL}:{free_port()}"
        ports = {
            "--port": self.endpoint,
            "--http-port": f"{LOCAL}:0",
            "--console-port": self.console,
        }
        words = [word for flag, at in ports.items() for word in (flag, at.rpartition(":")[2])]
        every = ["up", "--data", "data", *words, *arguments]
        super().__init__("up", every, folder=folder, settings=settings or {})

    @property
    def url(self) -> str:
        return f"http://{self.console}"

    def popmq(self, *arguments: str) -> str:
        return run_command(self.endpoint, self.folder, *arguments)

    def console_pid(self) -> int:
        """Of the process that listens on the console's port; 0 while there is none."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended
            if b"console" in words and self.console.encode() in words:
                return int(path.parent.name)
        return 0


def get(url: str, path: str) -> tuple[int, str]:
    """Status and text of a page; (0, why) while nothing answers."""
    try:
        return _asked(url, "GET", path, "", {})
    except OSError as error:
        return 0, str(error)


def post(url: str, path: str, fields: Sequence[tuple[str, str]]) -> str:
    """The text of the page that answers a form of the console."""
    headers = {"origin": url, "content-type": "application/x-www-form-urlencoded"}
    status, text = _asked(url, "POST", path, urlencode(fields), headers)
    assert status == 200, text
    return text


def _asked(
    url: str, method: str, path: str, body: str, headers: Mapping[str, str]
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, Parsed(answer.read().decode()).text
    finally:
        connection.close()


def wait_for(url: str, path: str, words: str) -> None:
    until(lambda: get(url, path), lambda seen: words in seen[1])
