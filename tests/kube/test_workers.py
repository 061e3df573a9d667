"""The operator's workers, without an API server."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

from kube.clusters import cluster, read

from popmq.operator.cluster.reconcile import ReconcileResult
from popmq.operator.cluster.reconcile_queue import AT_ONCE, ReconcileQueue
from popmq.operator.declared.declared_resources import ClusterMetadata
from popmq.operator.declared.metadata_client import NetworkMetadataClient, ProxyAccess
from popmq.operator.kube.admin_client import THREADS, DataPlaneUnavailable
from popmq.operator.kube.api_client import ApiUnavailable
from popmq.operator.kube.look_slots import outside_slot
from popmq.testing.running_broker import RunningBroker


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


async def test_clusters_that_hang_do_not_keep_a_healthy_one_waiting() -> None:
    """32 that never answer, and 8 slots."""
    hanging = asyncio.Semaphore(0)
    looked = asyncio.Event()

    async def look(namespace: str, name: str) -> ReconcileResult:
        if name == "healthy":
            looked.set()
        else:
            async with outside_slot():
                hanging.release()
                await asyncio.Event().wait()
        return ReconcileResult(soon=False, ready=True)

    loop = asyncio.get_running_loop()
    workers = ReconcileQueue(look, resync_s=3600, monotonic=loop.time, lost=lambda: None)
    async with asyncio.timeout(20):
        for number in range(32):
            workers.enqueue("apps", f"hangs-{number}")
        for _ in range(32):
            await hanging.acquire()
        workers.enqueue("apps", "healthy")
        await looked.wait()
        await workers.stop()


async def test_no_more_looks_than_slots_ask_the_api_server() -> None:
    asking, most = 0, 0
    done = asyncio.Semaphore(0)

    async def look(namespace: str, name: str) -> ReconcileResult:
        nonlocal asking, most
        for _ in range(2):
            asking += 1
            most = max(most, asking)
            await asyncio.sleep(0)
            asking -= 1
            async with outside_slot():
                await asyncio.sleep(0)
        done.release()
        return ReconcileResult(soon=False, ready=True)

    loop = asyncio.get_running_loop()
    workers = ReconcileQueue(look, resync_s=3600, monotonic=loop.time, lost=lambda: None)
    async with asyncio.timeout(20):
        for number in range(40):
            workers.enqueue("apps", f"cluster-{number}")
        for _ in range(40):
            await done.acquire()
        await workers.stop()
    assert 2 <= most <= AT_ONCE


def test_proxies_that_hang_do_not_take_the_threads_of_others() -> None:
    """Each is a port that accepts connections and never says a word."""

    async def story(endpoint: str) -> None:
        with ThreadPoolExecutor(THREADS) as threads, socket.create_server(("", 0)) as silent:
            nowhere = f"127.0.0.1:{silent.getsockname()[1]}"
            mute = NetworkMetadataClient(nowhere, threads)
            spec = read(cluster())
            hanging = [asyncio.ensure_future(mute.found(spec, ProxyAccess())) for _ in range(32)]
            metadata = await NetworkMetadataClient(endpoint, threads).found(spec, ProxyAccess())
            assert isinstance(metadata, ClusterMetadata)
            assert not any(task.done() for task in hanging)
            silent.close()
            failures = await asyncio.gather(*hanging, return_exceptions=True)
            assert {type(failure) for failure in failures} == {DataPlaneUnavailable}

    with RunningBroker() as popmq:
        asyncio.run(story(popmq.endpoint))
