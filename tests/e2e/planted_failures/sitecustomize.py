"""Plants a failure into a role: Python imports this file when its folder is in PYTHONPATH.

SIGUSR1 plants the failure that the variable PLANTED_FAILURE names, on the role's event loop.
"""

import asyncio
import gc
import os
import signal
import threading
from typing import TypeVar

T = TypeVar("T")


def fail(*arguments: object) -> None:
    raise RuntimeError("a planted failure")


async def failing_task() -> None:
    fail()


def plant(loop: asyncio.AbstractEventLoop) -> None:
    kind, _, where = os.environ["PLANTED_FAILURE"].partition(": ")
    match kind:
        case "signal handler":
            fail()
        case "call_soon":
            loop.call_soon(fail)
        case "call_later":
            loop.call_later(0.01, fail)
        case "call_soon_threadsafe":
            threading.Thread(target=loop.call_soon_threadsafe, args=(fail,)).start()
        case "socket callback":
            readable, written = os.pipe()
            loop.add_reader(readable, fail)
            os.write(written, b"x")
        case "task":
            loop.create_task(failing_task())
        case "future":
            _fail_in_future(loop)
        case "thread":
            threading.Thread(target=fail).start()
        case "step":
            _fail_in_steps()
        case "completion":
            _submit(where, fails_in_work=False)
        case "work":
            _submit(where, fails_in_work=True)
        case _:
            raise AssertionError(f"unknown failure {kind!r}")


def _fail_in_future(loop: asyncio.AbstractEventLoop) -> None:
    try:
        fail()
    except RuntimeError as error:
        loop.create_future().set_exception(error)


def _fail_in_steps() -> None:
    from popmq.common.step_loop import StepLoop

    for steps in _objects(StepLoop):
        steps._step = fail  # type: ignore[assignment]
        steps.wake()


def _submit(thread: str, *, fails_in_work: bool) -> None:
    from popmq.common.step_loop import FlusherThread

    for flusher in _objects(FlusherThread):
        if flusher._thread.name == thread:
            if fails_in_work:
                flusher.submit(fail, lambda error: None)
            else:
                flusher.submit(lambda: None, fail)


def _objects(kind: type[T]) -> list[T]:
    gc.unfreeze()  # a role freezes what its start made
    objects = [item for item in gc.get_objects() if type(item) is kind]
    assert objects, f"there is no {kind.__name__}"
    return objects


class _PlantingPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGUSR1, plant, loop)
        return loop


if "PLANTED_FAILURE" in os.environ:
    asyncio.set_event_loop_policy(_PlantingPolicy())
