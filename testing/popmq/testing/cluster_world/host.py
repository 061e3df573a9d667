"""Host: a machine of the simulated cluster, and the one process that runs on it.

What a process does comes to it through `post` and `after`.  A process that is stopped (SIGSTOP)
does it when it goes on, a dead one never; time passes for both.
"""

from collections import deque
from collections.abc import Callable

from popmq.testing.cluster_world.timeline import Action, HostClock, Timeline


class Host:
    """`life` counts the processes; work that was left to an earlier one is dropped."""

    def __init__(self, name: str, timeline: Timeline, clock: HostClock) -> None:
        self.name = name
        self.clock = clock
        self.process_clock = timeline.process_clock(clock)
        self.timeline = timeline
        self.life = 0
        self.up = False
        self.off = False  # the machine, not only the process
        self.paused = False
        self._ready: deque[Action] = deque()
        # Called when the work of the process raised; it decides what dies of it.
        self.on_error: Callable[[Exception], None] = _raise
        # Called when some of it was done.
        self.after_each: Action = _nothing

    # -- life

    def boot(self) -> None:
        self.life += 1
        self.up, self.off, self.paused = True, False, False
        self._ready.clear()

    def die(self, *, off: bool = False) -> None:
        self.life += 1
        self.off = off
        self.up = self.paused = False
        self._ready.clear()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """The first that it does is what waited, in order."""
        self.paused = False
        for _ in range(len(self._ready)):
            self.timeline.after(0, self._pump(self.life))

    # -- work of the process

    def post(self, action: Action) -> None:
        """On its loop, behind what waits there already."""
        if not self.up:
            return
        self._ready.append(action)
        if not self.paused:
            self.timeline.after(0, self._pump(self.life))

    def after(self, own_ms: int, action: Action) -> None:
        """When its clock has counted so many milliseconds."""
        life = self.life

        def due() -> None:
            if self.life == life:
                self.post(action)

        self.timeline.after(self.clock.true_ms(own_ms), due)

    def run(self, action: Action) -> None:
        """Do it now, as the process would; what it raises ends up where its errors do."""
        try:
            action()
        except Exception as error:
            self.on_error(error)
        self.after_each()

    def _pump(self, life: int) -> Action:
        def pump() -> None:
            if self.life == life and self._ready and not self.paused:
                self.run(self._ready.popleft())

        return pump


def _nothing() -> None:
    return


def _raise(error: Exception) -> None:
    raise error
