"""Names, labels, annotations and ports: what every object of a cluster is called.

Each name begins with the cluster's and each selector names cluster and role, so that two clusters
of one namespace, or two of one name, never meet.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
SECRET_ANNOTATION = "popmq.io/cluster-secret"  # on a pod: how it uses it
TLS_ANNOTATION = "popmq.io/process-tls"  # the same, of TLS between processes
ADMIN_ANNOTATION = "popmq.io/admin-port"  # on a proxy: "only" where no other port administers
ADMIN_ONLY = "only"
FIRST_USER_ANNOTATION = "popmq.io/first-user"  # on the sealing keys: proxies make the first user
RESTART_ANNOTATION = "popmq.io/restart"
POD_RESTART_ANNOTATION = "popmq.io/restart-pod"  # on a pod
PAUSE_ANNOTATION = "popmq.io/pause"
FENCE_ANNOTATION = "popmq.io/fence"
ADOPT_ANNOTATION = "popmq.io/adopt"
PROTECT_ANNOTATION = "popmq.io/delete-protection"
FORCE_REMOVAL_ANNOTATION = "popmq.io/remove-undrained"

PUBLIC_PORT = 8081
ADMIN_PORT = 8082
REMOTING_PORT = 9876
GROUP_PORT = 9900  # and those after it: one for each broker group
BROKER_PORT = 10911
CONTROLLER_PORT = 9878
HTTP_PORT = 5557
CONSOLE_PORT = 8083

ROLES = BROKER, PROXY, CONTROLLER = ("broker", "proxy", "controller")
REPORT = "report"
CONSOLE = "console"
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
    def remoting_endpoint(self) -> str:
        return f"{self.proxy}.{self.namespace}.svc:{REMOTING_PORT}"

    @property
    def admin(self) -> str:
        """The Service of the proxies' admin ports."""
        return f"{self.cluster}-admin"

    @property
    def admin_endpoint(self) -> str:
        return f"{self.admin}.{self.namespace}.svc:{ADMIN_PORT}"

    @property
    def console(self) -> str:
        """The Deployment, Service and Ingress of the web console."""
        return f"{self.cluster}-console"

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
    def process_tls(self) -> str:
        """The Secret with the certificate of brokers, proxies and controllers between them."""
        return f"{self.cluster}-process-tls"

    @property
    def authority(self) -> str:
        return f"{self.cluster}-ca"

    @property
    def cluster_secret(self) -> str:
        """The Secret that brokers, proxies and controllers prove to each other that they hold."""
        return f"{self.cluster}-cluster-secret"

    @property
    def users_key(self) -> str:
        """The Secret with the keys that seal users' secrets; proxies alone read it."""
        return f"{self.cluster}-users-key"

    @property
    def admin_user(self) -> str:
        """The Secret with the credentials of the Super user `admin`."""
        return f"{self.cluster}-admin-user"

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


def role_of(manifest: Mapping[str, Any]) -> str:
    """Of an object or pod, by its label; empty where it has none."""
    return str((manifest["metadata"].get("labels") or {}).get(ROLE_LABEL, ""))
