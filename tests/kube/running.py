"""An operator in this process on a real API server, with simulated brokers."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from kube.clusters import cluster
from kube.control_plane import ControlPlane, LivePods
from kube.fake_api import Object
from kube.world import NOW, Brokers

from popmq.operator.cluster.reconcile import Reconciler
from popmq.operator.kube.access import ApiAccess
from popmq.operator.kube.api_client import ApiClient, ApiError, ApiUnavailable
from popmq.operator.reports.report_reconcile import ReportDefaults


def given(name: str, namespace: str, **spec: Any) -> Object:
    """A BrokerCluster as somebody writes it."""
    new_cluster = cluster(name, namespace, **spec)
    for key in ("uid", "generation"):
        del new_cluster["metadata"][key]
    return new_cluster


class Running:
    """Its rights are those of `access`, the administrator's when none is given; `pause_s` is
    between two looks."""

    def __init__(
        self,
        plane: ControlPlane,
        access: ApiAccess | None = None,
        *,
        pause_s: float = 0.2,
        reports: ReportDefaults | None = None,
    ) -> None:
        self.plane = plane
        self.now = NOW
        self._pause_s = pause_s
        self.brokers = Brokers(LivePods(plane))
        self._access = access
        self._reports = reports

    def until(self, name: str, namespace: str, *, limit_s: float = 60.0) -> Object:
        """Look again and again until nothing goes on; the status then."""
        self._look(name, namespace, lambda: False, limit_s)
        return self.status(name, namespace)

    def look_until(self, name: str, namespace: str, done: Callable[[], bool]) -> None:
        """For what does not wait for pods."""
        self._look(name, namespace, done, 60.0)

    def grow_volumes(self, name: str, namespace: str, size: str) -> None:
        """The host-path driver grows nothing, so the test says that the volumes have grown."""
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"

        def asked() -> bool:
            claims = self.plane.items(path)
            return {claim["spec"]["resources"]["requests"]["storage"] for claim in claims} == {size}

        self._look(name, namespace, asked, 60.0)
        capacity = f'{{"capacity":{{"storage":"{size}"}}}}'
        where = ("-n", namespace, "--subresource=status", "--type=merge")
        for claim in self.plane.items(path):
            volume = claim["spec"]["volumeName"]
            self.plane.kubectl(
                "patch", "pv", volume, "--type=merge", "-p", f'{{"spec":{capacity}}}'
            )
            grown = f'{{"status":{capacity}}}'
            self.plane.kubectl("patch", "pvc", claim["metadata"]["name"], *where, "-p", grown)
        self.until(name, namespace)

    def status(self, name: str, namespace: str) -> Object:
        path = f"/apis/popmq.io/v1beta1/namespaces/{namespace}/brokerclusters/{name}"
        status: Object = (self.plane.get(path) or {}).get("status") or {}
        return status

    def images(self, namespace: str) -> set[str]:
        return {pod["spec"]["containers"][0]["image"] for pod in self.pods(namespace)}

    def pods(self, namespace: str) -> list[Object]:
        return self.plane.items(f"/api/v1/namespaces/{namespace}/pods")

    def _check_rights(self, name: str, namespace: str) -> None:
        """A right that is missing is a refusal like any other, and a mistake in every test."""
        for condition in self.status(name, namespace).get("conditions", []):
            assert "is forbidden" not in condition["message"], condition["message"]

    def _look(self, name: str, namespace: str, done: Callable[[], bool], limit_s: float) -> None:
        async def looks() -> None:
            api = ApiClient(self._access or self.plane.access)
            operator = Reconciler(
                api,
                self.brokers,
                default_image="popmq:1",
                reports=self._reports,
                now=lambda: self.now,
            )
            try:
                until = time.monotonic() + limit_s
                while time.monotonic() < until:
                    try:
                        outcome = await operator.reconcile(namespace, name)
                        self._check_rights(name, namespace)
                        if done() or not outcome.soon:
                            return
                    except ApiError as error:
                        if error.status in (401, 403):
                            raise
                    except ApiUnavailable:
                        pass
                    await asyncio.sleep(self._pause_s)
                raise AssertionError(f"{name} does not settle: {self.status(name, namespace)}")
            finally:
                await api.close()

        asyncio.run(looks())
