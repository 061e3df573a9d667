"""IndependentReads: the parts of a step, of which each waits for its own cold reads and for no
other's.

A slot that comes from the disk seconds before its time does not hold up the timers that are due
now (D3: another thread waits).
"""

from collections.abc import Callable

from popmq.broker.store.message_store import MessageStore
from popmq.common.disk import ColdRead


class IndependentReads:
    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._waiting: set[str] = set()
        self.trips = 0  # of the thread that waits

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def run(self, name: str, part: Callable[[], int]) -> int:
        """What the part did; 0 while bytes that it needs are on their way.

        A part that raises ColdRead is called again when they are in memory.
        """
        if name in self._waiting:
            return 0
        try:
            return part()
        except ColdRead as cold:
            self._fetch(name, cold.warm)
            return 0

    def _fetch(self, name: str, warm: Callable[[], object]) -> None:
        self._waiting.add(name)
        self.trips += 1

        def work() -> None:
            warm()

        def done(error: BaseException | None) -> None:
            self._waiting.discard(name)  # an error shows again, at the read that waits

        self._store.readers.submit(work, done)
