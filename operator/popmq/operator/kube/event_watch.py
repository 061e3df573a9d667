"""kopf, which watches popmq's own kinds: every event wakes the worker of a cluster.  What clusters
own is watched beside it (popmq.operator.kube.child_watch).

Only low-level event handlers are used, so kopf writes nothing into any object: no finalizer, no
annotation.  What happened does not matter, only that something did; a watch that was lost or starts
again tells of everything once more, which is as good.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import kopf

from popmq.operator.kube.access import ApiAccess
from popmq.operator.kube.api_client import ApiClient, ApiError, ApiUnavailable
from popmq.operator.kube.child_watch import ChildWatch, Wake
from popmq.operator.model.manifest import (
    BROKER_CLUSTER,
    CONSUMER_GROUP,
    LAG_REPORT,
    TOPIC,
    USER,
    Manifest,
    ResourceKind,
)

logger = logging.getLogger(__name__)

DEFINITIONS_S = 20.0  # so often the API server is asked which kinds it serves

Clusters = dict[tuple[str, str], Manifest]  # by namespace and name


def registry_of(
    access: ApiAccess, clusters: Clusters, wake: Wake, wake_declared: Wake
) -> kopf.OperatorRegistry:
    """`clusters` gets every BrokerCluster as the API server has it.  Both wakes name one: the first
    is called when it or one of its LagReports moved, the other when one of its Topics,
    ConsumerGroups or Users did."""
    # Its news is of no use to an operator's operator, and takes half a page each.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    registry = kopf.OperatorRegistry()

    # Coroutines, because kopf runs plain functions on threads.
    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        configuration = access.configuration
        token = await configuration.get_api_key_with_prefix("BearerToken")
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
            scheme="Bearer" if token else None,
            token=token.partition(" ")[2].strip() if token else None,
            default_namespace=access.namespace,
        )

    @kopf.on.event(*_resource(BROKER_CLUSTER), registry=registry)
    async def cluster_moved(
        event: kopf.RawEvent, namespace: str | None, name: str | None, **_: Any
    ) -> None:
        key = (namespace or "", name or "")
        if event["type"] == "DELETED":
            clusters.pop(key, None)
        else:
            clusters[key] = dict(event["object"])
        wake(*key)

    @kopf.on.event(*_resource(LAG_REPORT), registry=registry)
    async def report_moved(namespace: str | None, spec: kopf.Spec, **_: Any) -> None:
        wake(namespace or "", str(spec.get("cluster", "")))

    async def declared_moved(namespace: str | None, spec: kopf.Spec, **_: Any) -> None:
        wake_declared(namespace or "", str(spec.get("cluster", "")))

    for kind in (TOPIC, CONSUMER_GROUP, USER):
        handler = kopf.on.event(*_resource(kind), registry=registry, id=f"declared-{kind.plural}")
        handler(declared_moved)
    return registry


async def watch(
    api: ApiClient,
    registry: kopf.OperatorRegistry,
    children: Sequence[ChildWatch],
    namespaces: Sequence[str],
    *,
    stop: asyncio.Event,
    ready: asyncio.Event,
) -> None:
    """Until `stop` is set.  kopf looks once which kinds there are, so it begins anew when there are
    others: definitions may be applied after the operator's start, or be removed."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # so that no right on CRDs and namespaces is needed
    settings.watching.server_timeout = 600
    settings.watching.client_timeout = 660
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 60
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(child.run()) for child in children]
    try:
        while not stop.is_set():
            over = asyncio.Event()
            known = await _served(api)  # before kopf looks, so that none comes in between
            kinds = loop.create_task(_other_kinds(api, known, over, stop))
            tasks.append(kinds)
            await kopf.operator(
                registry=registry,
                settings=settings,
                standalone=True,
                namespaces=list(namespaces),
                clusterwide=not namespaces,
                stop_flag=over,
                ready_flag=ready,
            )
            if not kinds.done():  # it ended by itself
                break
            tasks.remove(kinds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _other_kinds(
    api: ApiClient, known: frozenset[str] | None, over: asyncio.Event, stop: asyncio.Event
) -> None:
    """Sets `over` when the API server serves other kinds of popmq.io, or `stop` is set."""
    while not stop.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(DEFINITIONS_S):
                await stop.wait()
            break
        served = await _served(api)
        if served is not None and served != known:
            logger.info("other kinds are served", extra={"kinds": sorted(served)})
            break
    over.set()


async def _served(api: ApiClient) -> frozenset[str] | None:
    """None: the API server does not say."""
    try:
        return await api.served(BROKER_CLUSTER.api_version)
    except (ApiError, ApiUnavailable):
        return None


def _resource(kind: ResourceKind) -> tuple[str, str, str]:
    group, _, version = kind.api_version.rpartition("/")
    return group, version, kind.plural
