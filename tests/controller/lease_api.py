"""A double of the Kubernetes API server: Leases with resourceVersions, and the ways it fails.

Only what a compare-and-set client can see: 404, 201, 200, 409 as the real one gives them
(kubernetes.io, "API concepts": resource versions), answers that get lost, and caches.
"""

import copy
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

PATH = re.compile(r"/apis/coordination\.k8s\.io/v1/namespaces/[a-z0-9-]+/leases(?:/(.+))?")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")

Answer = tuple[int, dict[str, Any]]


class LeaseApi:
    """A server on a free port for the time of a `with`."""

    def __init__(self) -> None:
        self.leases: dict[str, dict[str, Any]] = {}
        self.tokens: list[str] = []
        self.before_write: Callable[[], object] | None = None  # once
        self.lose_answers = 0  # so many writes happen, and their connection is cut
        self.repeat_writes = 0  # so many are sent twice, and the second answer is given
        self.stale_reads = False
        self.refuse_with = 0
        self.landed = threading.Event()  # a delayed write was tried
        self._held: threading.Event | None = None  # for the next write
        self._waiting: threading.Event | None = None
        self._old: dict[str, dict[str, Any]] = {}
        self._version = 100
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> "LeaseApi":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._waiting is not None:
            self._waiting.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def delay_writes(self) -> None:
        """The next one is tried when `let_writes_go` is called; those after it at once."""
        self._held = threading.Event()

    def let_writes_go(self) -> None:
        assert self._waiting is not None, "a write is waiting"
        self._waiting.set()

    def wait_if_delayed(self) -> bool:
        held, self._held = self._held, None
        if held is None:
            return False
        self._waiting = held
        held.wait(20)
        return True

    def read(self, name: str) -> Answer:
        with self._lock:
            leases = self._old if self.stale_reads else self.leases
            lease = leases.get(name)
            return (200, copy.deepcopy(lease)) if lease else (404, {"reason": "NotFound"})

    def write(self, name: str, lease: dict[str, Any]) -> Answer:
        """PUT with a name, POST without."""
        with self._lock:
            expected = lease["metadata"]["name"]
            if not NAME.fullmatch(expected) or len(expected) > 253:
                return 422, {"reason": "Invalid"}
            found_lease = self.leases.get(expected)
            if not name and found_lease is not None:
                return 409, {"reason": "AlreadyExists"}
            if name and found_lease is None:
                return 404, {"reason": "NotFound"}
            resource_version = lease["metadata"].get("resourceVersion")
            if (
                found_lease is not None
                and resource_version != found_lease["metadata"]["resourceVersion"]
            ):
                return 409, {"reason": "Conflict"}
            if found_lease is not None:
                self._old[expected] = found_lease
            self._version += 7
            lease["metadata"]["resourceVersion"] = str(self._version)
            self.leases[expected] = lease
            return (200 if name else 201), copy.deepcopy(lease)


def _handler(api: LeaseApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            api.tokens.append(self.headers.get("Authorization", ""))
            self._answer(*(self._refusal() or api.read(self._name())))

        def do_PUT(self) -> None:
            self._write()

        def do_POST(self) -> None:
            self._write()

        def _write(self) -> None:
            lease = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            before, api.before_write = api.before_write, None
            if before is not None:
                before()
            delayed = api.wait_if_delayed()
            answer = self._refusal() or api.write(self._name(), copy.deepcopy(lease))
            if delayed:
                api.landed.set()
            if api.repeat_writes:
                api.repeat_writes -= 1
                answer = api.write(self._name(), lease)
            if api.lose_answers:
                api.lose_answers -= 1
                self.close_connection = True
                return
            self._answer(*answer)

        def _name(self) -> str:
            match = PATH.fullmatch(self.path)
            assert match, self.path
            return match.group(1) or ""

        def _refusal(self) -> Answer | None:
            return (api.refuse_with, {"reason": "Refused"}) if api.refuse_with else None

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass  # it has given up

        def log_message(self, format: str, *args: object) -> None:
            return

    return Handler
