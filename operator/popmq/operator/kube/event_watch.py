"""kopf, which watches: every event of a cluster or of what it owns wakes the cluster's worker.

Only low-level event handlers are used, so kopf writes nothing into any object: no finalizer, no
annotation.  What happened does not matter, only that something did; a watch that was lost or starts
again tells of everything once more, which is as good.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import kopf

from popmq.operator.kube.api_client import ApiAccess
from popmq.operator.model.manifest import (
    BROKER_CLUSTER,
    CLAIM,
    CONFIG_MAP,
    CONSUMER_GROUP,
    CRON_JOB,
    DEPLOYMENT,
    LAG_REPORT,
    POD,
    SERVICE,
    STATEFUL_SET,
    TOPIC,
    ResourceKind,
)
from popmq.operator.model.names import CLUSTER_LABEL

WATCHED = (POD, STATEFUL_SET, DEPLOYMENT, SERVICE, CONFIG_MAP, CLAIM, CRON_JOB)

Wake = Callable[[str, str], None]


def registry_of(
    access: ApiAccess, ca: str | None, wake: Wake, wake_declared: Wake
) -> kopf.OperatorRegistry:
    """`ca` is the API server's CA as PEM.  Both wakes name a BrokerCluster: one is called when it
    or what it owns moved, the other when one of its Topics or ConsumerGroups did."""
    # Its news is of no use to an operator's operator, and takes half a page each.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    registry = kopf.OperatorRegistry()

    # Coroutines, because kopf runs plain functions on threads.
    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(
            server=access.url,
            ca_data=ca.encode() if ca else None,
            insecure=ca is None,
            scheme="Bearer" if access.token() else None,
            token=access.token() or None,
            default_namespace=access.namespace,
        )

    @kopf.on.event(*_resource(BROKER_CLUSTER), registry=registry)
    async def cluster_moved(namespace: str | None, name: str | None, **_: Any) -> None:
        wake(namespace or "", name or "")

    @kopf.on.event(*_resource(LAG_REPORT), registry=registry)
    async def report_moved(namespace: str | None, spec: kopf.Spec, **_: Any) -> None:
        wake(namespace or "", str(spec.get("cluster", "")))

    async def child_moved(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        wake(namespace or "", labels[CLUSTER_LABEL])

    for kind in WATCHED:
        kopf.on.event(
            *_resource(kind),
            labels={CLUSTER_LABEL: kopf.PRESENT},
            registry=registry,
            id=f"child-{kind.plural}",
        )(child_moved)

    async def declared_moved(namespace: str | None, spec: kopf.Spec, **_: Any) -> None:
        wake_declared(namespace or "", str(spec.get("cluster", "")))

    for kind in (TOPIC, CONSUMER_GROUP):
        handler = kopf.on.event(*_resource(kind), registry=registry, id=f"declared-{kind.plural}")
        handler(declared_moved)
    return registry


async def watch(
    registry: kopf.OperatorRegistry,
    namespaces: Sequence[str],
    *,
    stop: asyncio.Event,
    ready: asyncio.Event,
) -> None:
    """Until `stop` is set."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # so that no right on CRDs and namespaces is needed
    settings.watching.server_timeout = 600
    settings.watching.client_timeout = 660
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 60
    await kopf.operator(
        registry=registry,
        settings=settings,
        standalone=True,
        namespaces=list(namespaces),
        clusterwide=not namespaces,
        stop_flag=stop,
        ready_flag=ready,
    )


def _resource(kind: ResourceKind) -> tuple[str, str, str]:
    group, _, version = kind.api_version.rpartition("/")
    return group, version, kind.plural
