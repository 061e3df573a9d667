"""Names, labels, annotations and ports: what every object of a cluster is called.

Each name begins with the cluster's and each selector names cluster and role, so that two clusters
of one namespace, or two of one name, never meet.
"""

import hashlib
from dataclasses import dataclass

FIELD_MANAGER = "popmq-operator"
# Holds a Deployment's replicas when they are handed to an autoscaler.
SCALER_FIELD_MANAGER = "popmq-operator-scaler"
FINALIZER = "popmq.io/operator"

CLUSTER_LABEL = "popmq.io/cluster"
ROLE_LABEL = "app.kubernetes.io/component"
GROUP_LABEL = "popmq.io/broker-group"
CONTROLLER_LABEL = "popmq.io/controller"
REPORT_LABEL = "popmq.io/report"
FENCED_LABEL = "popmq.io/fenced"
MANAGED_BY = "app.kubernetes.io/managed-by"
OPERATOR_NAME = "popmq-operator"

TEMPLATE_ANNOTATION = "popmq.io/template"
CONFIG_ANNOTATION = "popmq.io/config"
RESTART_ANNOTATION = "popmq.io/restart"
POD_RESTART_ANNOTATION = "popmq.io/restart-pod"  # on a pod
PAUSE_ANNOTATION = "popmq.io/pause"
FENCE_ANNOTATION = "popmq.io/fence"
PROTECT_ANNOTATION = "popmq.io/delete-protection"
FORCE_REMOVAL_ANNOTATION = "popmq.io/remove-undrained"

PUBLIC_PORT = 8081
BROKER_PORT = 10911
CONTROLLER_PORT = 9878
HTTP_PORT = 5557

BROKER, PROXY, CONTROLLER = "broker", "proxy", "controller"
REPORT = "report"
DATA_VOLUME = "data"
CRON_JOB_NAME = 52  # characters


@dataclass(frozen=True, slots=True)
class ObjectNames:
    """Of the objects of one cluster."""

    cluster: str
    namespace: str

    def group(self, index: int) -> str:
        """What the broker group is called in popmq: in routes, receipts and records."""
        return f"broker-{index}"

    def group_set(self, index: int) -> str:
        """Its StatefulSet, headless Service and disruption budget."""
        return f"{self.cluster}-broker-{index}"

    def pod(self, index: int, ordinal: int) -> str:
        return f"{self.group_set(index)}-{ordinal}"

    def claim(self, index: int, ordinal: int) -> str:
        return f"{DATA_VOLUME}-{self.pod(index, ordinal)}"

    def index_of_set(self, name: str) -> int | None:
        prefix = f"{self.cluster}-broker-"
        rest = name.removeprefix(prefix)
        return int(rest) if name.startswith(prefix) and rest.isdecimal() else None

    def controller(self, number: int) -> str:
        return f"{self.cluster}-controller-{number}"

    def controller_address(self, number: int) -> str:
        return f"{self.controller(number)}.{self.namespace}.svc:{CONTROLLER_PORT}"

    def lease(self, group: str) -> str:
        """Where a controller keeps the group's record (popmq.controller.lease_store)."""
        return f"popmq.{self.cluster}.{group}"

    @property
    def proxy(self) -> str:
        return f"{self.cluster}-proxy"

    @property
    def proxy_endpoint(self) -> str:
        return f"{self.proxy}.{self.namespace}.svc:{PUBLIC_PORT}"

    @property
    def config(self) -> str:
        return f"{self.cluster}-config"

    def report(self, name: str) -> str:
        """A LagReport's CronJob; Kubernetes makes longer names from it and takes 52 characters."""
        whole = f"{self.cluster}-report-{name}"
        if len(whole) <= CRON_JOB_NAME:
            return whole
        digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
        return f"{whole[: CRON_JOB_NAME - 9].rstrip('-.')}-{digest}"

    @property
    def tls(self) -> str:
        return f"{self.cluster}-tls"

    @property
    def authority(self) -> str:
        return f"{self.cluster}-ca"

    def labels(self, role: str = "") -> dict[str, str]:
        labels = {
            "app.kubernetes.io/name": "popmq",
            "app.kubernetes.io/instance": self.cluster,
            "app.kubernetes.io/part-of": "popmq",
            MANAGED_BY: OPERATOR_NAME,
            CLUSTER_LABEL: self.cluster,
        }
        return {**labels, ROLE_LABEL: role} if role else labels

    def selector(self, role: str = "", **more: str) -> dict[str, str]:
        return {CLUSTER_LABEL: self.cluster, **({ROLE_LABEL: role} if role else {}), **more}
