"""The objects that declare topics and groups of a cluster, and the operator that sees to them."""

from datetime import datetime
from typing import Any

from kube.clusters import cluster
from kube.fake_api import FakeApi, Object
from kube.world import NOW

from popmq.cli.client import Client
from popmq.common.wire import admin_pb2 as admin
from popmq.operator.cluster.reconcile import ReconcileResult
from popmq.operator.declared.declared_reconcile import DeclaredReconciler
from popmq.operator.declared.metadata_client import NetworkMetadataClient
from popmq.operator.kube.api_client import ApiAccess, ApiClient, ApiError, ApiUnavailable

PLURALS = {"Topic": "topics", "ConsumerGroup": "consumergroups"}


class Desk:
    """A small API server with one BrokerCluster; `endpoint` is where the broker itself is."""

    def __init__(self, endpoint: str) -> None:
        self.api = FakeApi()
        self.client = Client(endpoint)
        self.now: datetime = NOW
        self._endpoint = endpoint
        self._asked: ApiClient | None = None

    async def __aenter__(self) -> "Desk":
        await self.api.start()
        access = ApiAccess(self.api.url, lambda: "operator", None, "apps")
        self._asked = ApiClient(access, timeout_s=5.0)
        self.api.put("brokerclusters", cluster())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._asked is not None
        await self._asked.close()
        await self.api.stop()
        # The broker is shared, and topics would be another test's surprise.
        for topic in self.client.topics(system=False):
            if topic.name[0] not in "%rR":
                self.client.topic(admin.DeleteTopicRequest(name=topic.name))
        for group in self.client.groups():
            self.client.group(admin.DeleteGroupRequest(name=group.name))
        self.client.close()

    def operator(self, endpoint: str = "") -> DeclaredReconciler:
        assert self._asked is not None
        plane = NetworkMetadataClient(endpoint or self._endpoint)
        return DeclaredReconciler(self._asked, plane, default_image="popmq:1", now=lambda: self.now)

    async def look(self, endpoint: str = "") -> ReconcileResult:
        return await self.operator(endpoint).reconcile("apps", "demo")

    async def settle(self) -> None:
        for _ in range(20):
            try:
                if not (await self.look()).soon:
                    return
            except (ApiError, ApiUnavailable):
                continue
        raise AssertionError("it does not settle")

    def declare(self, kind: str, name: str, /, **spec: Any) -> None:
        found = self.api.get(PLURALS[kind], "apps", name)
        metadata = (found or {}).get("metadata") or {"name": name, "namespace": "apps"}
        body = {
            **(found or {}),
            "apiVersion": "popmq.io/v1beta1",
            "kind": kind,
            "metadata": metadata,
            "spec": {"cluster": "demo", **spec},
        }
        self.api.put(PLURALS[kind], body)

    def condition(self, kind: str, name: str, what: str = "Ready") -> Object:
        found = self.api.get(PLURALS[kind], "apps", name)
        assert found is not None
        known = (found.get("status") or {}).get("conditions") or []
        return next((one for one in known if one["type"] == what), {})

    def drift(self, kind: str, name: str) -> list[str]:
        found = self.api.get(PLURALS[kind], "apps", name) or {}
        lines: list[str] = (found.get("status") or {}).get("drift") or []
        return lines

    def events(self) -> list[str]:
        return [one["reason"] for one in self.api.all("events")]

    def topics(self) -> dict[str, admin.Topic]:
        return {one.name: one for one in self.client.topics(system=False)}

    def groups(self) -> dict[str, admin.Group]:
        return {one.name: one for one in self.client.groups()}

    def alter(self, name: str, **fields: Any) -> None:
        topic = admin.Topic(name=name, **fields)
        self.client.topic(admin.AlterTopicRequest(topic=topic))
