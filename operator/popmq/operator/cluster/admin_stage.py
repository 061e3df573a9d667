"""Whether proxies still serve administration on the public port, beside their admin port. Pure.

A cluster of before does, until nothing needs it: then its proxies are rolled once more.  What
requires the admin port never goes back, unless spec.config says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from popmq.operator.model.certificates import SecretData, names_in
from popmq.operator.model.conditions import FALSE, TRUE, ConditionValue
from popmq.operator.model.manifest import Manifest, at, is_rolled_out, name_of
from popmq.operator.model.names import ADMIN_ANNOTATION, ADMIN_ONLY, ADMIN_PORT
from popmq.operator.model.spec import ClusterSpec

SETTING = "proxy.admin_on_public"
REPORTS_NAMED = 4
SEPARATE = ConditionValue(FALSE, "AdminPortOnly", f"only port {ADMIN_PORT} administers")


@dataclass(frozen=True, slots=True)
class AdminStage:
    on_public: bool = False
    verdict: ConditionValue = field(default_factory=lambda: SEPARATE)


def admin_stage(
    spec: ClusterSpec,
    deployment: Manifest | None,
    secrets: Mapping[str, SecretData],
    reports: Sequence[Manifest],
) -> AdminStage:
    """`deployment` is that of the proxies, None for a new cluster.  `reports` are the cluster's
    LagReports: one with an image of its own may be older than the admin port."""
    wished = spec.config.get(SETTING, "").strip().lower()
    if wished == "true":
        why = f"spec.config[{SETTING}] is true: every client may administer the cluster"
        return AdminStage(True, ConditionValue(TRUE, "Configured", why))
    template = at(deployment, "spec", "template")
    is_separate = at(template, "metadata", "annotations", ADMIN_ANNOTATION) == ADMIN_ONLY
    if deployment is None or is_separate or wished == "false":
        return AdminStage()
    if not _has_admin_port(template) or not is_rolled_out(deployment):
        return _kept("RollingOut", "until every proxy has an admin port")
    foreign = [name_of(report) for report in reports if at(report, "spec", "image")]
    if foreign:
        names = ", ".join(sorted(foreign)[:REPORTS_NAMED])
        why = f"LagReports with an image of their own may be older than the admin port: {names}"
        return _kept("OtherImages", f"{why}; set spec.config[{SETTING}] to false if none is")
    host = spec.names.admin_endpoint.rpartition(":")[0]
    if spec.tls.mode == "Secret" and not _names(secrets.get(spec.tls.secret, {}), host):
        why = f"the certificate of Secret {spec.tls.secret} does not name {host}"
        return _kept("CertificateLacksName", f"{why}, so reports would refuse it at the admin port")
    return AdminStage()


def _kept(reason: str, why: str) -> AdminStage:
    message = f"the public port administers, too: {why}"
    return AdminStage(True, ConditionValue(TRUE, reason, message))


def _has_admin_port(template: Manifest | None) -> bool:
    """A proxy that is ready has read proxy.admin_listen: an older image would not start with it."""
    containers = at(template, "spec", "containers") or [{}]
    ports = containers[0].get("ports") or []
    return any(port.get("containerPort") == ADMIN_PORT for port in ports)


def _names(certificate: SecretData, host: str) -> bool:
    names = names_in(certificate)
    return host in names or f"*.{host.partition('.')[2]}" in names
