"""A cluster around the operator: the fake API server, the controllers of Kubernetes, the brokers.

Workloads get their pods at once; the brokers are as their pods are: a broker whose pod is there and
ready is alive, comes into the SyncStateSet two looks later, and the first that is in it leads when
the master's pod is gone.  `down` records how many brokers of a group were missing at a time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from kube.access import token_access
from kube.clusters import cluster
from kube.fake_api import FakeApi, Object, copied

from popmq.operator.cluster.cluster_secrets import PlaneAccess
from popmq.operator.cluster.observed import DrainState, GroupHealth
from popmq.operator.cluster.reconcile import LeaseLost, Reconciler, ReconcileResult
from popmq.operator.kube.admin_client import DataPlaneUnavailable
from popmq.operator.kube.api_client import ApiClient, ApiError, ApiUnavailable
from popmq.operator.model.spec import ClusterSpec
from popmq.operator.reports.report_reconcile import ReportDefaults

NOW = datetime(2030, 1, 1, tzinfo=UTC)
CATCH_UP_LOOKS = 2


class Pods(Protocol):
    """Where the pods are looked up."""

    def all(self, plural: str, namespace: str = "") -> list[Object]: ...
    def get(self, plural: str, namespace: str, name: str) -> Object | None: ...


class Brokers:
    """What controllers would say, from the pods that there are."""

    def __init__(self, api: Pods) -> None:
        self._api = api
        self.masters: dict[tuple[str, str], str] = {}
        self.in_sync: dict[tuple[str, str], set[str]] = {}
        self.draining: dict[tuple[str, str], bool] = {}
        self.left: dict[str, int] = {}  # by broker group: messages
        self.away = False
        self.cut: set[str] = set()  # off from the others, and not from their nodes
        self.owner = "broker-0"  # of topics and consumer groups
        self.handed_over: list[tuple[str, str, str]] = []
        self.signed_by: list[str] = []  # users that set auth.mode
        self._looks: dict[str, int] = {}  # by pod uid

    def key(self, spec: ClusterSpec, group: str) -> tuple[str, str]:
        return f"{spec.namespace}/{spec.name}", group

    def alive(self, spec: ClusterSpec, group: str) -> list[str]:
        names = []
        for pod in self._api.all("pods", spec.namespace):
            labels = pod["metadata"]["labels"]
            ours = labels.get("popmq.io/cluster") == spec.name
            there = is_ready(pod) and pod["metadata"]["name"] not in self.cut
            if ours and labels.get("popmq.io/broker-group") == group and there:
                names.append(pod["metadata"]["name"])
        return names

    def look_at(self, spec: ClusterSpec, group: str) -> GroupHealth:
        key, alive = self.key(spec, group), self.alive(spec, group)
        members = self.in_sync.setdefault(key, set()) & set(alive)
        if not members and len(alive) == spec.brokers.replicas and key not in self.masters:
            members = set(alive)  # the first record
        for name in alive:
            pod = self._api.get("pods", spec.namespace, name)
            uid = pod["metadata"]["uid"] if pod else ""
            looks = self._looks[uid] = self._looks.get(uid, 0) + 1
            if members and looks >= CATCH_UP_LOOKS:
                members.add(name)
        self.in_sync[key] = members
        master = self.masters.get(key, "")
        if master not in members:
            master = min(members, default="")
            if master:
                self.masters[key] = master
        return GroupHealth(
            master=master,
            epoch=1,
            in_sync=frozenset(members),
            alive=frozenset(alive),
            draining=self.draining.get(key, False),
            owner=group == self.owner,
        )

    async def health(
        self, spec: ClusterSpec, access: PlaneAccess
    ) -> Mapping[str, GroupHealth] | None:
        if self.away:
            return None
        groups = {
            pod["metadata"]["labels"]["popmq.io/broker-group"]
            for pod in self._api.all("pods", spec.namespace)
            if "popmq.io/broker-group" in pod["metadata"]["labels"]
            and pod["metadata"]["labels"]["popmq.io/cluster"] == spec.name
        }
        return {group: self.look_at(spec, group) for group in sorted(groups)}

    async def hand_over(self, spec: ClusterSpec, group: str, to: str, access: PlaneAccess) -> None:
        self.give_way(spec, group, to)

    def give_way(self, spec: ClusterSpec, group: str, to: str) -> None:
        key = self.key(spec, group)
        if to not in self.in_sync.get(key, set()):
            raise DataPlaneUnavailable(f"{to} is not in the SyncStateSet")
        self.handed_over.append((group, self.masters[key], to))
        self.masters[key] = to

    async def drain(
        self, spec: ClusterSpec, group: str, access: PlaneAccess, *, undo: bool
    ) -> None:
        self.draining[self.key(spec, group)] = not undo

    async def keep_mode(self, spec: ClusterSpec, access: PlaneAccess) -> str:
        self.signed_by.append(access.signer.access_key)
        return spec.auth_mode.lower() or "off"

    async def drain_state(self, spec: ClusterSpec, group: str, access: PlaneAccess) -> DrainState:
        left = self.left.get(group, 0)
        return DrainState(left == 0, f"{group} still has {left} messages")


class World:
    """`unready`: pods that do not get ready. Each write is followed by Kubernetes' own work."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self.brokers = Brokers(self.api)
        self.now = NOW
        self.reports: ReportDefaults | None = None
        self.unready: set[str] = set()
        self.broken_images: set[str] = set()
        self.down: dict[str, int] = {}
        self.restarted: list[str] = []
        self.api.after = self.settle
        self._client: ApiClient | None = None
        self._born = 0

    async def __aenter__(self) -> "World":
        await self.api.start()
        await self.restart_operator()
        return self

    async def restart_operator(self) -> None:
        """With a client that remembers nothing."""
        if self._client is not None:
            await self._client.close()
        self._client = ApiClient(token_access(self.api.url), timeout_s=5.0)

    async def __aexit__(self, *_: object) -> None:
        assert self._client is not None
        await self._client.close()
        await self.api.stop()

    def operator(self) -> Reconciler:
        """A fresh one: whatever an earlier one had in mind is gone."""
        assert self._client is not None
        return Reconciler(
            self._client,
            self.brokers,
            default_image="popmq:1",
            reports=self.reports,
            now=lambda: self.now,
        )

    async def look(self, name: str = "demo", namespace: str = "apps") -> ReconcileResult:
        return await self.operator().reconcile(namespace, name)

    async def run(self, name: str = "demo", namespace: str = "apps", *, looks: int = 80) -> None:
        """Until nothing goes on any more; requests that fail are repeated by the next look."""
        for _ in range(looks):
            try:
                if not (await self.look(name, namespace)).soon:
                    return
            except (ApiError, ApiUnavailable, LeaseLost):
                continue
        raise AssertionError(f"{name} does not settle: {self.status(name, namespace)}")

    def add(self, cluster: Object) -> None:
        self.api.put("brokerclusters", cluster)

    def change(self, name: str = "demo", namespace: str = "apps", **spec: Any) -> None:
        cluster = self.api.get("brokerclusters", namespace, name)
        assert cluster is not None
        for part, value in spec.items():
            old = cluster["spec"].get(part)
            both = isinstance(old, dict) and isinstance(value, dict)
            cluster["spec"][part] = {**old, **value} if both else value
        self.api.put("brokerclusters", cluster)

    def annotate(self, key: str, value: str | None, name: str = "demo") -> None:
        cluster = self.api.get("brokerclusters", "apps", name)
        assert cluster is not None
        annotations = cluster["metadata"].setdefault("annotations", {})
        if value is None:
            annotations.pop(key, None)
        else:
            annotations[key] = value
        self.api.put("brokerclusters", cluster)

    def status(self, name: str = "demo", namespace: str = "apps") -> Object:
        cluster = self.api.get("brokerclusters", namespace, name)
        status: Object = (cluster or {}).get("status") or {}
        return status

    def condition(self, kind: str, name: str = "demo") -> Object:
        for condition in self.status(name).get("conditions", []):
            if condition["type"] == kind:
                found_condition: Object = condition
                return found_condition
        return {}

    def pods(self, role: str = "broker", name: str = "demo", namespace: str = "apps") -> list[str]:
        expected = {"popmq.io/cluster": name, "app.kubernetes.io/component": role}
        return [
            pod["metadata"]["name"]
            for pod in self.api.all("pods", namespace)
            if expected.items() <= pod["metadata"]["labels"].items()
        ]

    def events(self, reason: str = "") -> list[Object]:
        """In the order in which they were recorded last."""
        recorded = [event for event in self.api.all("events") if reason in ("", event["reason"])]
        return sorted(recorded, key=lambda event: int(event["metadata"]["resourceVersion"]))

    def images(self, namespace: str = "apps") -> set[str]:
        pods = self.api.all("pods", namespace)
        return {pod["spec"]["containers"][0]["image"] for pod in pods}

    # -- what the controllers of Kubernetes do

    def settle(self) -> None:
        for statefulset in self.api.all("statefulsets"):
            self._count_down(statefulset)
            self._stateful(statefulset)
        for statefulset in self.api.all("deployments"):
            self._deployment(statefulset)
        for pod in self.api.all("pods"):
            self._kubelet(pod)

    def _count_down(self, group_set: Object) -> None:
        name, namespace = group_set["metadata"]["name"], group_set["metadata"]["namespace"]
        expected = group_set["spec"]["replicas"]
        there = [
            pod
            for pod in self.api.all("pods", namespace)
            if pod["metadata"]["name"].rpartition("-")[0] == name and is_ready(pod)
        ]
        if self.api.get("statefulsets", namespace, name) and group_set.get("status"):
            self.down[name] = max(self.down.get(name, 0), expected - len(there))

    def _stateful(self, group_set: Object) -> None:
        metadata, spec = group_set["metadata"], group_set["spec"]
        for ordinal in range(spec["replicas"]):
            name = f"{metadata['name']}-{ordinal}"
            self._claim(group_set, name)
            if self.api.get("pods", metadata["namespace"], name) is None:
                self._make_pod(group_set, name)
        for pod in self.api.all("pods", metadata["namespace"]):
            prefix, _, number = pod["metadata"]["name"].rpartition("-")
            if prefix == metadata["name"] and int(number) >= spec["replicas"]:
                self.api.remove("pods", metadata["namespace"], pod["metadata"]["name"])
        self._set_status("statefulsets", group_set, {"observedGeneration": metadata["generation"]})

    def _claim(self, group_set: Object, pod: str) -> None:
        (template,) = group_set["spec"]["volumeClaimTemplates"]
        namespace, name = group_set["metadata"]["namespace"], f"data-{pod}"
        persistentvolumeclaims = self.api.get("persistentvolumeclaims", namespace, name)
        if persistentvolumeclaims is None:
            claim = copied(template)
            claim["metadata"].update(name=name, namespace=namespace)
            claim["spec"].setdefault("storageClassName", "plain")
            persistentvolumeclaims = claim
        # The driver of the volumes: as large as was asked for.
        size = persistentvolumeclaims["spec"]["resources"]["requests"]["storage"]
        persistentvolumeclaims["status"] = {"capacity": {"storage": size}}
        self.api.put("persistentvolumeclaims", persistentvolumeclaims)

    def _deployment(self, deployment: Object) -> None:
        metadata, spec = deployment["metadata"], deployment["spec"]
        namespace, expected = metadata["namespace"], spec["replicas"]
        names = [f"{metadata['name']}-pod-{n}" for n in range(expected)]
        for name in names:
            pod = self.api.get("pods", namespace, name)
            new = spec["template"]["metadata"]["annotations"]
            if pod and pod["metadata"]["annotations"] != new:
                self.api.remove("pods", namespace, name)
            if self.api.get("pods", namespace, name) is None:
                self._make_pod(deployment, name)
        for pod in self.api.all("pods", namespace):
            name = pod["metadata"]["name"]
            if name.startswith(f"{metadata['name']}-pod-") and name not in names:
                self.api.remove("pods", namespace, name)
        ready = {
            "readyReplicas": expected,
            "updatedReplicas": expected,
            "observedGeneration": metadata["generation"],
        }
        self._set_status("deployments", deployment, ready)

    def _set_status(self, plural: str, body: Object, status: Object) -> None:
        stored = self.api.objects[plural, body["metadata"]["namespace"], body["metadata"]["name"]]
        stored.body["status"] = status

    def _make_pod(self, workload: Object, name: str) -> None:
        template = copied(workload["spec"]["template"])
        self._born += 1
        owner = {"uid": workload["metadata"]["uid"], "kind": workload["kind"]}
        template["metadata"].update(
            name=name, namespace=workload["metadata"]["namespace"], ownerReferences=[owner]
        )
        self.restarted.append(name)
        self.api.put("pods", template)

    def _kubelet(self, pod: Object) -> None:
        image = pod["spec"]["containers"][0]["image"]
        runs = image not in self.broken_images
        ready = runs and pod["metadata"]["name"] not in self.unready
        status = {
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [{"state": {"running": {}} if runs else {"waiting": {}}}],
        }
        if pod.get("status") != status:
            pod["status"] = status
            self.api.put("pods", pod)
            stored = self.api.objects["pods", pod["metadata"]["namespace"], pod["metadata"]["name"]]
            stored.body["status"] = status


def is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


Story = Callable[[World], Awaitable[None]]


def play(story: Story) -> None:
    async def whole() -> None:
        async with World() as world:
            await story(world)

    asyncio.run(whole())


async def running(world: World, given: Object | None = None) -> None:
    world.add(given or cluster())
    await world.run()


def versions(world: World) -> dict[tuple[str, str, str], str]:
    """By object; events come with each step."""
    return {
        key: message.body["metadata"]["resourceVersion"]
        for key, message in world.api.objects.items()
        if key[0] != "events"
    }
