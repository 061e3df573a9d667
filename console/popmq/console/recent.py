"""Recent answers, shared by all open pages: a hundred of them cost what one costs.

An answer is good for half a second, and for longer when it took long: up to two and a half
seconds, so that what a page shows is never older than five.  A failure is good for half a second.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar

GOOD_FOR_S = 0.5
SHARE = 8
MAX_GOOD_FOR_S = 2.5
MAX_ENTRIES = 256

T = TypeVar("T")


@dataclass(slots=True)
class _Entry:
    future: Future[object] = field(default_factory=Future)
    good_until_s: float = 0.0  # once it is answered


class RecentAnswers:
    """`get` asks once for each key and time, whatever the number of threads that want it."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        *,
        max_good_for_s: float = MAX_GOOD_FOR_S,
    ) -> None:
        self._now_s = now_s
        self._max_good_for_s = max_good_for_s
        self._lock = Lock()
        self._entries: dict[object, _Entry] = {}

    def get(self, key: object, ask: Callable[[], T]) -> T:
        """The answer, or the exception, of the last `ask` with this key; its type is the key's."""
        with self._lock:
            asked_s = self._now_s()
            entry = self._entries.get(key)
            is_own = entry is None or (entry.future.done() and asked_s > entry.good_until_s)
            if entry is None or is_own:
                entry = _Entry()
                self._entries.pop(key, None)  # the newest are the last ones
                self._entries[key] = entry
                while len(self._entries) > MAX_ENTRIES:
                    self._entries.pop(next(iter(self._entries)))
        if is_own:
            self._answer(entry, asked_s, ask)
        return entry.future.result()  # type: ignore[return-value]  # of the same `ask`

    def _answer(self, entry: _Entry, asked_s: float, ask: Callable[[], T]) -> None:
        error: BaseException | None = None
        try:
            answer = ask()
        except BaseException as raised:  # whoever waits gets it too
            error = raised
        took_s = self._now_s() - asked_s
        good_for_s = min(max(GOOD_FOR_S, SHARE * took_s), self._max_good_for_s)
        if error is None:
            entry.good_until_s = asked_s + good_for_s
            entry.future.set_result(answer)
        else:
            entry.good_until_s = asked_s + took_s + GOOD_FOR_S
            entry.future.set_exception(error)

    def clear(self) -> None:
        """After a change: what was answered before does not show it."""
        with self._lock:
            self._entries.clear()
