"""What other servers answer, for which no page waits longer than a second.

Threads send the requests, so a silent server delays no page; all pages share an answer.
"""

import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from http.client import HTTPException

from popmq.common.errors import Unavailable

PATIENCE_S = 1.0  # of a page, from when it was asked
SILENCE_S = 2.0  # after which a server counts as away
LONGEST_S = 5.0  # of an answer
MAX_BYTES = 4 << 20
GOOD_FOR_S = 10.0
FAILED_FOR_S = 3.0
MAX_ENTRIES = 64
MAX_ASKED = 16  # at a time


@dataclass(slots=True)
class Fetch:
    began_s: float
    future: Future[bytes] = field(default_factory=Future)
    good_until_s: float = 0.0

    def answer(self) -> bytes:
        """Raises Unavailable."""
        left_s = self.began_s + PATIENCE_S - time.monotonic()
        if not wait([self.future], max(0.0, left_s)).done:
            raise Unavailable(f"no answer within {PATIENCE_S:g} s")
        return self.future.result()


class Fetches:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, Fetch] = {}  # by URL

    def start(self, url: str) -> Fetch:
        """Ask, or use what was asked a moment ago."""
        with self._lock:
            now_s = time.monotonic()
            known = self._entries.get(url)
            if known and (not known.future.done() or now_s < known.good_until_s):
                return known
            fetch = Fetch(now_s)
            if sum(not each.future.done() for each in self._entries.values()) >= MAX_ASKED:
                fetch.future.set_exception(Unavailable(f"{MAX_ASKED} requests have no answer yet"))
                return fetch
            self._entries.pop(url, None)
            self._entries[url] = fetch
            done = [name for name, each in self._entries.items() if each.future.done()]
            for name in done[: max(0, len(self._entries) - MAX_ENTRIES)]:
                del self._entries[name]
        threading.Thread(target=_run, args=(fetch, url), name="fetch", daemon=True).start()
        return fetch


def _run(fetch: Fetch, url: str) -> None:
    try:
        content = _read(url)
    except Unavailable as error:
        fetch.good_until_s = time.monotonic() + FAILED_FOR_S
        fetch.future.set_exception(error)
    except BaseException as error:
        fetch.future.set_exception(error)
        raise
    else:
        fetch.good_until_s = time.monotonic() + GOOD_FOR_S
        fetch.future.set_result(content)


def _read(url: str) -> bytes:
    end_s, content = time.monotonic() + LONGEST_S, bytearray()
    try:
        with urllib.request.urlopen(url, timeout=SILENCE_S) as response:
            while piece := response.read1(64 << 10):
                content += piece
                if len(content) > MAX_BYTES:
                    raise Unavailable(f"the answer has more than {MAX_BYTES} bytes")
                if time.monotonic() > end_s:
                    raise Unavailable(f"the answer takes longer than {LONGEST_S:g} s")
    except urllib.error.HTTPError as error:
        error.close()  # it is the answer, too
        raise Unavailable(f"status {error.code}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        text = getattr(reason, "strerror", "") or str(reason) or type(reason).__name__
        raise Unavailable(text) from error
    except HTTPException as error:
        raise Unavailable(f"no HTTP answer: {type(error).__name__}") from error
    return bytes(content)
