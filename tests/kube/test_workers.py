"""The operator's workers, without an API server."""

import asyncio

from popmq.operator.cluster.reconcile import ReconcileResult
from popmq.operator.cluster.reconcile_queue import ReconcileQueue
from popmq.operator.kube.api_client import ApiUnavailable


async def test_workers_stop_although_a_request_turns_their_cancellation_into_a_timeout() -> None:
    # HTTP clients do so when the cancellation arrives together with their own timeout, as after
    # SIGCONT.
    looking = asyncio.Event()

    async def look(namespace: str, name: str) -> ReconcileResult:
        looking.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError as error:
            raise ApiUnavailable("the request timed out") from error
        return ReconcileResult(soon=False, ready=True)

    loop = asyncio.get_running_loop()
    workers = ReconcileQueue(look, resync_s=3600, monotonic=loop.time, lost=lambda: None)
    workers.enqueue("apps", "demo")
    async with asyncio.timeout(10):
        await looking.wait()
        await workers.stop()
