"""The section `operator` of the settings (docs/concepts/operator.md)."""

from dataclasses import dataclass

from popmq.common.settings.section import SettingsSection, checked, constant, within


def _bad_namespaces(values: tuple[str, ...]) -> str:
    good = all(one.replace("-", "").isalnum() and one.islower() for one in values)
    return "" if good else "names of namespaces"


@dataclass(frozen=True, slots=True)
class OperatorSettings(SettingsSection):
    """`image` is what clusters get that name none, `report_image` what LagReports do;
    `report_role` is the ClusterRole of reports that make pods; `controller_address` replaces the
    names of the controllers' Services for an operator outside of the cluster's network."""

    namespaces: tuple[str, ...] = checked((), _bad_namespaces)  # none: every namespace
    image: str = "popmq:latest"
    report_image: str = "popmq-reports:latest"
    report_role: str = ""  # "": none may
    kubeconfig: str = ""
    identity: str = ""  # "": the name of the host, which is that of the pod
    lease: str = "popmq-operator"
    lease_namespace: str = ""  # "": its own
    lease_duration_ms: int = within(15_000, 1_000, 600_000)
    lease_renew_ms: int = within(2_000, 100, 60_000)
    resync_ms: int = within(30_000, 100, 3_600_000)
    declared_resync_ms: int = constant(5_000)
    controller_address: str = ""
    proxy_address: str = ""

    def relations(self) -> None:
        low = 5 * self.lease_renew_ms
        if self.lease_duration_ms < low:
            raise self.refuse("lease_duration_ms", f"at least {low}, five operator.lease_renew_ms")
