"""FlusherGroup: the blocking work of one life of a broker, which ends before the next begins.

A broker that is made anew from its disk (a deposed master, a store to be rebuilt) must not find
the old one's writes going on underneath.  Once retired, nothing new is begun, nothing that is
done is told to the old one, and when the last piece ended somebody else hears of that.
"""

from collections.abc import Callable

from popmq.common.step_loop import Done, Flusher, Work


class FlusherGroup:
    def __init__(self) -> None:
        self._busy = 0
        self._retired: Callable[[], None] | None = None

    def wrap(self, flusher: Flusher) -> "GroupedFlusher":
        """That flusher's work, as long as this life lasts."""
        return GroupedFlusher(self, flusher)

    def stop(self, then: Callable[[], None]) -> None:
        """Begin nothing more; `then` when nothing is going on, perhaps at once."""
        assert self._retired is None, "retired twice"
        self._retired = then
        if not self._busy:
            then()

    @property
    def is_stopped(self) -> bool:
        return self._retired is not None

    def begin(self) -> None:
        self._busy += 1

    def end(self) -> None:
        self._busy -= 1
        if self._retired is not None and not self._busy:
            self._retired()


class GroupedFlusher:
    def __init__(self, owner: FlusherGroup, flusher: Flusher) -> None:
        self._owner = owner
        self._flusher = flusher

    def submit(self, work: Work, done: Done) -> None:
        owner = self._owner
        if owner.is_stopped:
            return

        def finished(error: BaseException | None) -> None:
            try:
                if not owner.is_stopped:
                    done(error)
            finally:
                owner.end()

        owner.begin()
        self._flusher.submit(work, finished)
