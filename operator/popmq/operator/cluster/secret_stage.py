"""How far a cluster is with its secret: a new one requires it at once, an older one after two
rollouts.

First every pod gets the secret and serves peers without it, too; when all hold it, every pod is
rolled once more and requires it.  The stage is read from the workloads and pods of this look, and
never goes back: a template that requires the secret stays as it is, whatever pods somebody adds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from popmq.common.errors import ConfigError
from popmq.common.protocol.cluster_secret import ClusterSecret, parse_cluster_secret
from popmq.operator.model.conditions import FALSE, TRUE, ConditionValue
from popmq.operator.model.manifest import DEPLOYMENT, Manifest, at, is_seen, kind_of, name_of
from popmq.operator.model.names import SECRET_ANNOTATION
from popmq.operator.model.spec import ClusterSpec
from popmq.operator.model.stages import PeerRequirement
from popmq.operator.resources.pods import SECRET_KEY

PODS_NAMED = 4
REQUIRED, ROLLING_OUT, TAKEN = "Required", "RollingOut", "NameTaken"


@dataclass(frozen=True, slots=True)
class StoredSecret:
    """The cluster's Secret as it is.  `problem`: why it cannot be used."""

    secret: ClusterSecret | None = field(default=None, repr=False)
    exists: bool = False
    owned: bool = False
    created: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SecretStage:
    """`missing`: the Secret is to be created, or the name is taken by another owner's."""

    use: PeerRequirement = PeerRequirement.REQUIRED
    missing: bool = True
    verdict: ConditionValue = field(default_factory=lambda: ConditionValue(TRUE, REQUIRED, ""))

    @property
    def is_begun(self) -> bool:
        """The Secret is made, and pods get it next."""
        return self.use is PeerRequirement.NONE and self.verdict.reason == ROLLING_OUT


def stored_secret(text: bytes | None, *, owned: bool, created: str, name: str) -> StoredSecret:
    """`text`: what it has under its key, None when it has no such key."""
    if not owned:
        problem = f"Secret {name} exists and this BrokerCluster does not own it"
        return StoredSecret(exists=True, problem=problem)
    origin = f"key {SECRET_KEY} of Secret {name}"
    if text is None:
        return StoredSecret(
            exists=True, owned=True, created=created, problem=f"{origin} is missing"
        )
    try:
        secret = parse_cluster_secret(text, origin)
    except ConfigError as error:
        return StoredSecret(exists=True, owned=True, created=created, problem=str(error))
    return StoredSecret(secret, exists=True, owned=True, created=created)


def secret_stage(
    spec: ClusterSpec,
    stored: StoredSecret,
    workloads: Sequence[Manifest],
    pods: Sequence[Manifest],
) -> SecretStage:
    """`workloads` are the Deployments and StatefulSets that the cluster owns, `pods` its brokers,
    proxies and controllers."""
    use = _use(spec, stored, workloads, pods)
    return SecretStage(use, not stored.owned, _verdict(spec, stored, use, pods))


def _use(
    spec: ClusterSpec,
    stored: StoredSecret,
    workloads: Sequence[Manifest],
    pods: Sequence[Manifest],
) -> PeerRequirement:
    templates = [at(workload, "spec", "template") or {} for workload in workloads]
    uses = [_annotated(template) for template in templates]
    is_new = not workloads and not pods
    if is_new:
        use = PeerRequirement.NONE if stored.problem else PeerRequirement.REQUIRED
    elif PeerRequirement.REQUIRED in uses:
        use = PeerRequirement.REQUIRED
    elif stored.secret is None:  # it is made first, or cannot be used
        use = PeerRequirement.ACCEPTED if PeerRequirement.ACCEPTED in uses else PeerRequirement.NONE
    elif all(uses) and all(map(is_settled, workloads)) and all(map(_annotated, pods)):
        use = PeerRequirement.REQUIRED
    else:
        use = PeerRequirement.ACCEPTED
    wished = spec.config.get("cluster.secret_required", "true").strip().lower()
    if use is PeerRequirement.REQUIRED and wished != "true":
        return PeerRequirement.ACCEPTED
    return use


def _verdict(
    spec: ClusterSpec, stored: StoredSecret, use: PeerRequirement, pods: Sequence[Manifest]
) -> ConditionValue:
    name = spec.names.cluster_secret
    if stored.problem:
        reason = "Unusable" if stored.owned else TAKEN
        return ConditionValue(FALSE, reason, stored.problem)
    older = [pod for pod in pods if _annotated(pod) and _created(pod) < stored.created]
    if older:
        why = (
            f"Secret {name} was replaced: {names_of(older)} hold the one before, which other pods "
            "refuse. Delete all pods at once, so that all read the new one"
        )
        return ConditionValue(FALSE, "Replaced", why)
    if not stored.exists and any(map(_annotated, pods)):
        why = f"Secret {name} was deleted: a new one is made"
        return ConditionValue(FALSE, "Replaced", why)
    if "cluster.secret_required" in spec.config and use is PeerRequirement.ACCEPTED:
        why = "spec.config[cluster.secret_required] is false: peers without the secret are served"
        return ConditionValue(FALSE, "NotRequired", why)
    left = [pod for pod in pods if _annotated(pod) != PeerRequirement.REQUIRED]
    if use is not PeerRequirement.REQUIRED or left:
        why = f"peers without the cluster's secret are served by {names_of(left) or 'new pods'}"
        return ConditionValue(FALSE, ROLLING_OUT, why)
    return ConditionValue(TRUE, REQUIRED, "every pod requires the cluster's secret of its peers")


def _annotated(template: Manifest) -> str:
    """Of a pod or its template; empty when it does not hold the secret."""
    return str(at(template, "metadata", "annotations", SECRET_ANNOTATION) or "")


def is_settled(workload: Manifest) -> bool:
    """No pod can be made from an earlier template any more."""
    pods, updated = (at(workload, "status", key) or 0 for key in ("replicas", "updatedReplicas"))
    return is_seen(workload) and (kind_of(workload) != DEPLOYMENT or pods <= updated)


def _created(pod: Manifest) -> str:
    return str(at(pod, "metadata", "creationTimestamp") or "")


def names_of(pods: Sequence[Manifest]) -> str:
    names = sorted(map(name_of, pods))
    more = len(names) - PODS_NAMED
    return ", ".join(names[:PODS_NAMED]) + (f" and {more} more" if more > 0 else "")
