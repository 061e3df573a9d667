"""Users of a cluster: which of their Secrets there are, and what proxies hold of them.

A cluster that is new with auth.mode On gets the first user from its proxies, so that it is never
open.  One of before gets the keys first; when every proxy holds them, the operator makes the user
`admin` and sets the mode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from popmq.common.signing import Signer
from popmq.operator.kube.api_client import ApiClient
from popmq.operator.model.conditions import FALSE, TRUE, UNKNOWN, ConditionValue
from popmq.operator.model.manifest import (
    DEPLOYMENT,
    SECRET,
    Manifest,
    ResourceKind,
    at,
    is_owned_by,
    is_rolled_out,
)
from popmq.operator.model.names import FIRST_USER_ANNOTATION
from popmq.operator.model.spec import ClusterSpec
from popmq.operator.model.stages import UsersUse
from popmq.operator.resources.users import mounts_users, signer_in


@dataclass(frozen=True, slots=True)
class UsersStage:
    """`missing`: the Secrets are to be created.  `held`: every proxy holds the keys."""

    use: UsersUse = UsersUse.NONE
    missing: bool = False
    held: bool = False
    signer: Signer = field(default_factory=Signer)
    problem: str = ""


async def users_stage(
    api: ApiClient,
    spec: ClusterSpec,
    objects: Mapping[tuple[ResourceKind, str], Manifest],
    pods: Sequence[Manifest],
) -> UsersStage:
    """Asks for Secrets only where users are in use, or are to be."""
    deployment = objects.get((DEPLOYMENT, spec.names.proxy))
    mounted = mounts_users(deployment)
    if spec.auth_mode not in ("On", "Observe") and not mounted:
        return UsersStage()
    names = (spec.names.users_key, spec.names.admin_user)
    key, admin = [await api.get(SECRET, spec.namespace, name) for name in names]
    for name, secret in zip(names, (key, admin), strict=True):
        if secret is not None and not is_owned_by(secret, spec.uid):
            why = f"Secret {name} exists and this BrokerCluster does not own it"
            return UsersStage(UsersUse.KEY if mounted else UsersUse.NONE, problem=why)
    is_new = not pods and deployment is None and spec.auth_mode == "On"
    first = is_new if key is None else _makes_first(key)
    use = UsersUse.FIRST if first else UsersUse.KEY
    missing = key is None or admin is None
    signer = signer_in(admin)
    problem = ""
    if admin is not None and signer is None:
        problem = f"Secret {names[1]} has no access_key and secret"
    held = mounted and deployment is not None and is_rolled_out(deployment)
    return UsersStage(use, missing, held, signer or Signer(), problem)


def users_verdict(spec: ClusterSpec, stage: UsersStage, before: ConditionValue) -> ConditionValue:
    """Until the cluster has answered, what is known of the last time."""
    if stage.problem:
        return ConditionValue(FALSE, "SecretUnusable", stage.problem)
    if stage.use is UsersUse.NONE:
        why = "callers need not be users: spec.auth.mode is not On"
        return ConditionValue(FALSE, "Off", why)
    if not stage.held:
        return ConditionValue(UNKNOWN, "RollingOut", "proxies get the keys of users' secrets")
    if before.status and before.reason == (spec.auth_mode or before.reason):
        return before
    return ConditionValue(UNKNOWN, "NotYet", "auth.mode is not known yet")


def mode_verdict(mode: str) -> ConditionValue:
    """`mode` as the cluster has it."""
    reason = mode.capitalize()
    why = {
        "on": "callers must be users, and may what their policy allows",
        "observe": "nothing is refused; proxies count and log what would be",
    }.get(mode, "callers need not be users: auth.mode is off")
    return ConditionValue(TRUE if mode == "on" else FALSE, reason, why)


def _makes_first(key: Manifest) -> bool:
    return bool(at(key, "metadata", "annotations", FIRST_USER_ANNOTATION) == "true")
