"""The objects that declare topics and groups of a cluster, and the operator that sees to them."""

from datetime import datetime
from typing import Any

from kube.access import token_access
from kube.clusters import cluster
from kube.fake_api import FakeApi, Object
from kube.world import NOW

from popmq.cli.client import Client
from popmq.common.signing import Signer
from popmq.common.wire import admin_pb2 as admin
from popmq.operator.cluster.reconcile import ReconcileResult
from popmq.operator.declared.declared_reconcile import DeclaredReconciler
from popmq.operator.declared.metadata_client import NetworkMetadataClient
from popmq.operator.declared.user_reconcile import UserClient
from popmq.operator.kube.api_client import ApiClient, ApiError, ApiUnavailable
from popmq.operator.resources.users import credentials

PLURALS = {"Topic": "topics", "ConsumerGroup": "consumergroups", "User": "users"}


class Desk:
    """A small API server with one BrokerCluster; `endpoint` is where the broker itself is."""

    def __init__(self, endpoint: str, signer: Signer | None = None) -> None:
        """`signer` is the Super user of a cluster with users."""
        self.api = FakeApi()
        self.client = Client(endpoint, signer=signer)
        self._signer = signer
        self.now: datetime = NOW
        self._endpoint = endpoint
        self._asked: ApiClient | None = None

    async def __aenter__(self) -> "Desk":
        await self.api.start()
        self._asked = ApiClient(token_access(self.api.url), timeout_s=5.0)
        self.api.put("brokerclusters", cluster())
        if self._signer is not None:
            self._put_users(self._signer)
        return self

    def _put_users(self, signer: Signer) -> None:
        """What the operator keeps of a cluster with users."""
        demo = self.api.get("brokerclusters", "apps", "demo")
        assert demo is not None
        users = {"type": "Users", "status": "True", "reason": "On", "message": ""}
        self.api.put("brokerclusters", {**demo, "status": {"conditions": [users]}})
        metadata = {
            "name": "demo-admin-user",
            "namespace": "apps",
            "ownerReferences": [{"uid": demo["metadata"]["uid"]}],
        }
        self.api.put("secrets", {"metadata": metadata, "data": credentials(signer)})

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
        return DeclaredReconciler(
            self._asked,
            plane,
            default_image="popmq:1",
            now=lambda: self.now,
            users=UserClient(endpoint or self._endpoint),
        )

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
        manifest = self.api.get(PLURALS[kind], "apps", name)
        metadata = (manifest or {}).get("metadata") or {"name": name, "namespace": "apps"}
        body = {
            **(manifest or {}),
            "apiVersion": "popmq.io/v1beta1",
            "kind": kind,
            "metadata": metadata,
            "spec": {"cluster": "demo", **spec},
        }
        self.api.put(PLURALS[kind], body)

    def condition(self, kind: str, name: str, what: str = "Ready") -> Object:
        manifest = self.api.get(PLURALS[kind], "apps", name)
        assert manifest is not None
        known = (manifest.get("status") or {}).get("conditions") or []
        return next((condition for condition in known if condition["type"] == what), {})

    def drift(self, kind: str, name: str) -> list[str]:
        manifest = self.api.get(PLURALS[kind], "apps", name) or {}
        lines: list[str] = (manifest.get("status") or {}).get("drift") or []
        return lines

    def events(self) -> list[str]:
        return [event["reason"] for event in self.api.all("events")]

    def topics(self) -> dict[str, admin.Topic]:
        return {topic.name: topic for topic in self.client.topics(system=False)}

    def groups(self) -> dict[str, admin.Group]:
        return {group.name: group for group in self.client.groups()}

    def alter(self, name: str, **fields: Any) -> None:
        topic = admin.Topic(name=name, **fields)
        self.client.topic(admin.AlterTopicRequest(topic=topic))
