"""How far a cluster is with TLS between its processes, on the way to it or back.  Pure.

A new cluster has at once what its spec wishes.  Another one gets there in two rollouts: in between
all pods have a certificate and accept plain text, too.  The stage is read from the workloads and
pods of this look.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from popmq.operator.cluster.secret_stage import is_settled, names_of
from popmq.operator.model.conditions import FALSE, TRUE, ConditionValue
from popmq.operator.model.manifest import Manifest, at
from popmq.operator.model.names import TLS_ANNOTATION
from popmq.operator.model.spec import ClusterSpec
from popmq.operator.model.stages import PeerRequirement


@dataclass(frozen=True, slots=True)
class ProcessTlsStage:
    """`verdict` is None for a cluster that has no TLS between processes and wishes none."""

    use: PeerRequirement = PeerRequirement.NONE
    verdict: ConditionValue | None = None


def process_tls_stage(
    spec: ClusterSpec, workloads: Sequence[Manifest], pods: Sequence[Manifest]
) -> ProcessTlsStage:
    """As `secret_stage`."""
    none, required = PeerRequirement.NONE, PeerRequirement.REQUIRED
    wished, unwished = (required, none) if spec.tls.between_processes else (none, required)
    templates = [_use_of(at(workload, "spec", "template") or {}) for workload in workloads]
    uses = [*templates, *map(_use_of, pods)]
    is_new = not uses
    is_between = unwished not in uses and all(map(is_settled, workloads))
    if is_new or wished in templates or is_between:
        return ProcessTlsStage(wished, _verdict(wished, wished, pods))
    return ProcessTlsStage(
        PeerRequirement.ACCEPTED, _verdict(wished, PeerRequirement.ACCEPTED, pods)
    )


def _verdict(
    wished: PeerRequirement, use: PeerRequirement, pods: Sequence[Manifest]
) -> ConditionValue | None:
    left = [pod for pod in pods if _use_of(pod) != wished]
    if wished is PeerRequirement.NONE and use is wished and not left:
        return None
    if use is not wished or left:
        why = f"plain text is accepted from processes by {names_of(left) or 'new pods'}"
        return ConditionValue(FALSE, "RollingOut", why)
    return ConditionValue(TRUE, "Required", "every pod requires TLS of its peers")


def _use_of(template: Manifest) -> str:
    annotation = at(template, "metadata", "annotations", TLS_ANNOTATION)
    return str(annotation or PeerRequirement.NONE)
