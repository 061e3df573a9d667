"""Pages of metrics that were recorded, or that a program wrote, served to a real Prometheus."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from typing import Any

END_OF_PAGE = "# end of page\n"


class PageServer:
    """Serves what `page` returns at each scrape."""

    def __init__(self, page: Callable[[], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = page().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def job(self, name: str, **labels: str) -> dict[str, Any]:
        """A scrape configuration of Prometheus."""
        target = f"127.0.0.1:{self._server.server_port}"
        return {"job_name": name, "static_configs": [{"targets": [target], "labels": labels}]}

    def __enter__(self) -> "PageServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def recorded(path: Path) -> Callable[[], str]:
    """The pages of a file one after the other, and again from the first."""
    pages = cycle(path.read_text(encoding="utf-8").split(END_OF_PAGE))
    return lambda: next(pages)
