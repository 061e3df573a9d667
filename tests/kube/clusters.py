"""BrokerClusters for the tests of the operator, as the API server would hand them out."""

import copy
from typing import Any

from popmq.operator.model.manifest import Manifest
from popmq.operator.model.spec import ClusterSpec, read_spec

IMAGE = "popmq:test"


def cluster(name: str = "demo", namespace: str = "apps", **spec: Any) -> Manifest:
    """With the parts of the spec that are given; the CRD's defaults are read_spec's own."""
    return {
        "apiVersion": "popmq.io/v1beta1",
        "kind": "BrokerCluster",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-of-{namespace}-{name}",
            "generation": 1,
            "annotations": {},
        },
        "spec": copy.deepcopy(spec),
    }


def read(given: Manifest) -> ClusterSpec:
    return read_spec(given, default_image=IMAGE)


SMALL = cluster()

# Something of everything.
LARGE = cluster(
    "big",
    image="registry.example/popmq:2",
    imagePullPolicy="Always",
    imagePullSecrets=[{"name": "pull"}],
    config={"pop.max_batch": "16", "store.segment_bytes": "256MiB"},
    brokers={
        "groups": 2,
        "replicas": 3,
        "durability": {"flush": "Quorum", "minInSync": 3},
        "storage": {"size": "100Gi", "className": "fast", "onDelete": "Delete"},
        "retention": "3d",
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "4Gi"}},
        "template": {
            "labels": {"team": "payments"},
            "annotations": {"example.com/note": "x"},
            "nodeSelector": {"disk": "nvme"},
            "priorityClassName": "high",
            "terminationGracePeriodSeconds": 120,
            "schedulerName": "packing",
            "env": [{"name": "TZ", "value": "Europe/Berlin"}],
            "volumes": [{"name": "extra", "configMap": {"name": "extra"}}],
            "volumeMounts": [{"name": "extra", "mountPath": "/etc/extra", "readOnly": True}],
        },
    },
    proxies={
        "autoscaling": {
            "minReplicas": 3,
            "maxReplicas": 9,
            "cpuPercent": 50,
            "loopBusyMetric": "popmq_loop_busy_ratio",
        },
        "service": {"type": "LoadBalancer", "annotations": {"example.com/lb": "internal"}},
        "maxConnectionAge": "5m",
    },
    controller={"replicas": 1},
    remoting={"advertise": "queue.example:9876", "groupPorts": 2},
    console={
        "ingress": {"host": "queue.example", "className": "nginx", "tlsSecretName": "queue-tls"},
        "resources": {"requests": {"memory": "128Mi"}},
    },
    tls={"mode": "Secret", "secretName": "mine", "plainText": False},
    networkPolicy={"clients": [{"podSelector": {"matchLabels": {"app": "shop"}}}]},
    monitoring={"podMonitor": True, "rules": True, "labels": {"release": "prometheus"}},
)
