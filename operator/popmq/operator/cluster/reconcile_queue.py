"""A task for each cluster that looks at it again and again: when woken, and when time has passed.

A wake while a look goes on makes another look; many wakes make one.  A look that fails is repeated
after a second, doubling up to half a minute; one that was refused is tried again after that.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from popmq.common.unhandled import report_if_failed
from popmq.operator.cluster.reconcile import LeaseLost, ReconcileResult
from popmq.operator.kube.admin_client import DataPlaneUnavailable
from popmq.operator.kube.api_client import ApiError, ApiUnavailable
from popmq.operator.kube.look_slots import look_slot

logger = logging.getLogger(__name__)

SOON_S = 1.0
RETRY_S = 30.0  # what was refused or failed again and again
GAP_S = 0.1  # so that a burst of events makes one look
NEWS_S = 3.0  # so often it is asked for
AT_ONCE = 8  # looks that ask the API server; others wait (popmq.operator.kube.look_slots)

ClusterKey = tuple[str, str]  # namespace, name
Reconcile = Callable[[str, str], Awaitable[ReconcileResult]]
News = Callable[[str, str], Awaitable[bool]]


@dataclass
class ReconcileCounters:
    """For metrics."""

    looks: int = 0
    failed: int = 0
    seconds: float = 0.0
    ready: dict[ClusterKey, bool] = field(default_factory=dict)
    certificate_ends: dict[ClusterKey, float] = field(default_factory=dict)
    failing_reports: dict[ClusterKey, int] = field(default_factory=dict)


class ReconcileQueue:
    """`lost` is called once when a look finds that the Lease is gone.  `news` is what nobody wakes
    for; it is asked every `news_s` between two looks."""

    def __init__(
        self,
        look: Reconcile,
        *,
        resync_s: float,
        monotonic: Callable[[], float],
        lost: Callable[[], None],
        news: News | None = None,
        news_s: float = NEWS_S,
    ) -> None:
        self._look = look
        self._news = news
        self._news_s = news_s
        self._resync_s = resync_s
        self._monotonic = monotonic
        self._lost = lost
        self._woken: dict[ClusterKey, asyncio.Event] = {}
        self._tasks: dict[ClusterKey, asyncio.Task[None]] = {}
        self._begun: dict[ClusterKey, float] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._stopping = False
        self.counted = ReconcileCounters()

    @property
    def clusters(self) -> int:
        return len(self._tasks)

    @property
    def longest_reconcile_s(self) -> float:
        """Of the looks that go on now; large when one hangs."""
        now = self._monotonic()
        return max((now - begun for begun in self._begun.values()), default=0.0)

    def enqueue(self, namespace: str, name: str) -> None:
        if self._stopping:
            return
        key = (namespace, name)
        if key not in self._tasks:
            self._woken[key] = asyncio.Event()
            task = self._tasks[key] = asyncio.get_running_loop().create_task(self._work(key))
            task.add_done_callback(lambda done: self._ended(key, done))
        self._woken[key].set()

    async def stop(self) -> None:
        self._stopping = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, key: ClusterKey) -> None:
        back_off_s = SOON_S
        # Cancelling alone is not enough: a request whose timeout ends at the same moment raises
        # a timeout instead, and the task would go on.
        while not self._stopping:
            await asyncio.sleep(GAP_S)
            self._woken[key].clear()
            outcome = await self._once(key)
            if outcome is None:
                delay_s = back_off_s
                back_off_s = min(back_off_s * 2, self._retry_s)
            elif outcome.gone:
                return
            else:
                back_off_s = SOON_S
                delay_s = self._delay_s(outcome)
                self.counted.ready[key] = outcome.ready
                if outcome.certificate_end is not None:
                    self.counted.certificate_ends[key] = outcome.certificate_end
                if outcome.failing_reports is not None:
                    self.counted.failing_reports[key] = outcome.failing_reports
            try:
                async with asyncio.timeout(delay_s):
                    await self._stirred(key)
            except TimeoutError:
                continue

    @property
    def _retry_s(self) -> float:
        return min(RETRY_S, self._resync_s)

    def _delay_s(self, outcome: ReconcileResult) -> float:
        if outcome.soon:
            return min(SOON_S, self._resync_s)
        return self._retry_s if outcome.refused else self._resync_s

    async def _stirred(self, key: ClusterKey) -> None:
        while True:
            try:
                async with asyncio.timeout(self._news_s):
                    await self._woken[key].wait()
                    return
            except TimeoutError:
                if await self._has_news(key):
                    return

    async def _has_news(self, key: ClusterKey) -> bool:
        try:
            return self._news is not None and await self._news(*key)
        except Exception:
            # As with a look.
            logger.exception("news failed", extra={"cluster": "/".join(key)})
            return False

    async def _once(self, key: ClusterKey) -> ReconcileResult | None:
        """None: it failed, and is to be repeated."""
        async with look_slot(self._slots):
            begun = self._begun[key] = self._monotonic()
            try:
                self.counted.looks += 1
                return await self._look(*key)
            except (ApiError, ApiUnavailable, DataPlaneUnavailable) as error:
                self.counted.failed += 1
                logger.warning("look failed", extra={"cluster": "/".join(key), "why": str(error)})
                return None
            except LeaseLost:
                self._lost()
                raise
            except Exception:
                # One cluster with something unheard of must not stop the others.
                self.counted.failed += 1
                logger.exception("look failed", extra={"cluster": "/".join(key)})
                return None
            finally:
                self._begun.pop(key, None)
                self.counted.seconds += self._monotonic() - begun

    def _ended(self, key: ClusterKey, done: "asyncio.Task[None]") -> None:
        woken = self._woken.pop(key)
        del self._tasks[key]
        self.counted.ready.pop(key, None)
        self.counted.certificate_ends.pop(key, None)
        self.counted.failing_reports.pop(key, None)
        if done.cancelled():
            return
        if done.exception() is not None:
            if not isinstance(done.exception(), LeaseLost):  # which ends the process by itself
                report_if_failed(done)
            return
        if woken.is_set():  # made again while the last look found it gone
            self.enqueue(*key)
