"""A broker group: a StatefulSet that the operator rolls itself, a headless Service, a budget.

`OnDelete`, because only the operator knows who leads; `Parallel`, because replicas need each other
to start; names of pods are what brokers are called, and never an IP address.
"""

from popmq.common.address import format_address
from popmq.operator.model.manifest import DISRUPTION_BUDGET, SERVICE, STATEFUL_SET, Manifest, make
from popmq.operator.model.names import BROKER, BROKER_PORT, DATA_VOLUME, GROUP_LABEL
from popmq.operator.model.spec import ClusterSpec
from popmq.operator.resources.config import DATA_FOLDER, read_by, settings
from popmq.operator.resources.pods import (
    container,
    disruption_budget,
    http_port,
    pod_template,
    spread,
    variable,
)

GRACE_S = 60  # hands over, closes the store, writes a snapshot
RECOVERY_S = 3600  # reads its log


def broker_group(
    spec: ClusterSpec, index: int, *, replicas: int, template_size: str
) -> list[Manifest]:
    """`replicas` and `template_size` are what may be applied now: the spec's, unless a scale-in
    or a growth of the volumes is going on (popmq.operator.cluster.plan)."""
    names, group = spec.names, spec.names.group(index)
    labels = {**names.labels(BROKER), GROUP_LABEL: group}
    selector = names.selector(BROKER, **{GROUP_LABEL: group})
    service = make(SERVICE, names.group_set(index), spec.namespace, labels)
    service["spec"] = {
        "clusterIP": "None",
        # Replicas have to find each other before they are ready.
        "publishNotReadyAddresses": True,
        "selector": selector,
        "ports": [{"name": "frames", "port": BROKER_PORT, "targetPort": "frames"}],
    }
    budget = make(DISRUPTION_BUDGET, names.group_set(index), spec.namespace, labels)
    budget["spec"] = disruption_budget(selector)
    group_set = make(STATEFUL_SET, names.group_set(index), spec.namespace, labels)
    when_deleted = "Delete" if spec.brokers.storage.delete else "Retain"
    group_set["spec"] = {
        "serviceName": names.group_set(index),
        "replicas": replicas,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "persistentVolumeClaimRetentionPolicy": {
            "whenDeleted": when_deleted,
            "whenScaled": "Retain",
        },
        "selector": {"matchLabels": selector},
        "template": _template(spec, index),
        "volumeClaimTemplates": [_claim(spec, labels, template_size)],
    }
    return [service, budget, group_set]


def _template(spec: ClusterSpec, index: int) -> Manifest:
    names, brokers = spec.names, spec.brokers
    host = f"$(POPMQ_BROKER_NODE).{names.group_set(index)}.{spec.namespace}.svc"
    manifest = container(
        spec,
        BROKER,
        ports={"frames": BROKER_PORT, **http_port()},
        env=[
            variable("POPMQ_BROKER_NAME", names.group(index)),
            {
                "name": "POPMQ_BROKER_NODE",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
            },
            variable("POPMQ_BROKER_ADVERTISE", format_address(host, BROKER_PORT)),
        ],
        resources=brokers.resources,
        mounts=[{"name": DATA_VOLUME, "mountPath": DATA_FOLDER}],
        slow_start_s=RECOVERY_S,
    )
    group = {GROUP_LABEL: names.group(index)}
    return pod_template(
        spec,
        BROKER,
        brokers.template,
        manifest,
        labels=group,
        config=read_by(BROKER, settings(spec)),
        grace_s=GRACE_S,
        defaults=spread(spec, BROKER, **group),
    )


def _claim(spec: ClusterSpec, labels: dict[str, str], size: str) -> Manifest:
    claim: Manifest = {
        "metadata": {"name": DATA_VOLUME, "labels": labels},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": size}},
        },
    }
    if spec.brokers.storage.class_name is not None:
        claim["spec"]["storageClassName"] = spec.brokers.storage.class_name
    return claim
