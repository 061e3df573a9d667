"""Forks: one run of the simulator goes on, and at each of its moments a copy of it ends otherwise.

A copy is a fork of the process, so that what came before is run once for all of them.  It says what
state it is in, is told whether one like that was looked at already, and at its end says what it
found.  The copies die without a word to anybody else.
"""

import gc
import os
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import NoReturn


@dataclass(slots=True)
class Forks:
    """`hear` gets what each copy said, in no order; at most `limit` of them live at a time."""

    limit: int
    on_result: Callable[[object], None]
    _seen: set[bytes] = field(default_factory=set)
    _alive: dict[Connection, int] = field(default_factory=dict)
    _parent: Connection | None = None  # in a copy

    @property
    def is_copy(self) -> bool:
        return self._parent is not None

    def fork(self) -> bool:
        """Whether this is the copy now."""
        while len(self._alive) >= self.limit:
            self._listen()
        gc.freeze()  # or a copy's first collection would touch, and so copy, all of it
        ours, theirs = Pipe()
        with warnings.catch_warnings():  # of the other threads, which stand still
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            theirs.close()
            self._alive[ours] = pid
            return False
        ours.close()
        for other in self._alive:
            other.close()
        self._alive.clear()
        self._parent = theirs
        gc.disable()
        return True

    def is_new(self, state: bytes) -> bool:
        """In a copy: whether no other one was in that state."""
        assert self._parent is not None
        self._parent.send(state)
        return bool(self._parent.recv())

    def leave(self, report: Callable[[], object]) -> NoReturn:
        """In a copy: say what was found, and be no more."""
        assert self._parent is not None
        try:
            self._parent.send((report(),))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def finish(self) -> None:
        """Wait for the rest of them."""
        while self._alive:
            self._listen()
        gc.unfreeze()

    def _listen(self) -> None:
        for ready in wait(list(self._alive)):
            assert isinstance(ready, Connection)
            try:
                data = ready.recv()
            except EOFError as error:
                os.waitpid(self._alive.pop(ready), 0)
                raise AssertionError("a copy ended without a word") from error
            if isinstance(data, bytes):
                ready.send(data not in self._seen)
                self._seen.add(data)
                continue
            ready.close()
            os.waitpid(self._alive.pop(ready), 0)
            self.on_result(data[0])
