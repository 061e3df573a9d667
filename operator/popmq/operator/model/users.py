"""Users as objects of Kubernetes: what each asks for, and how the cluster's user differs. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from popmq.common.errors import PopmqError
from popmq.common.users import PolicyEntry, check_entry, check_networks, check_user_name
from popmq.common.wire import admin_pb2 as admin
from popmq.operator.model.manifest import Manifest, at
from popmq.operator.model.spec import SpecError

ROTATE_ANNOTATION = "popmq.io/rotate-secret"  # on a User: another value makes another secret
# On its Secret: which of the user's secrets it has, and which rotation was done last.
SECRET_ID_ANNOTATION = "popmq.io/secret-id"
ROTATED_ANNOTATION = "popmq.io/rotated"
ENABLED, DISABLED = "enabled", "disabled"


@dataclass(frozen=True, slots=True)
class DeclaredUser:
    """A User as it was read. `name` is what the cluster calls it, its access key."""

    name: str
    enabled: bool
    networks: tuple[str, ...]
    entries: tuple[PolicyEntry, ...]
    delete: bool  # with the object
    secret_name: str
    rotate: str
    manifest: Manifest

    @property
    def is_deleting(self) -> bool:
        return "deletionTimestamp" in self.manifest["metadata"]

    @property
    def uid(self) -> str:
        return str(self.manifest["metadata"].get("uid", ""))


def read_user(manifest: Manifest) -> DeclaredUser:
    """Raises SpecError for what the API server, or the cluster, would refuse."""
    spec, metadata = manifest.get("spec") or {}, manifest["metadata"]
    name = str(spec.get("name") or metadata["name"])
    try:
        check_user_name(name)
        networks = tuple(map(str, spec.get("networks") or ()))
        check_networks(networks)
        entries = tuple(map(_entry, spec.get("policy") or ()))
    except PopmqError as error:
        raise SpecError(f"spec: {error}") from error
    return DeclaredUser(
        name=name,
        enabled=spec.get("enabled") is not False,
        networks=networks,
        entries=entries,
        delete=spec.get("onDelete") != "Retain",
        secret_name=str(spec.get("secretName") or f"{spec['cluster']}-user-{metadata['name']}"),
        rotate=str((metadata.get("annotations") or {}).get(ROTATE_ANNOTATION, "")),
        manifest=manifest,
    )


def _entry(entry: Mapping[str, Sequence[str]]) -> PolicyEntry:
    policy = PolicyEntry(
        tuple(entry.get("resources") or ()),
        tuple(action.lower() for action in entry.get("actions") or ()),
        tuple(entry.get("networks") or ()),
        entry.get("effect") == "Deny",
    )
    check_entry(policy)
    return policy


def changes_of(desired: DeclaredUser, current: admin.User) -> list[tuple[str, object]]:
    """Methods and their requests, in their order: rights come before others go."""
    had = [_of_wire(entry) for entry in current.entries]
    granted = [entry for entry in desired.entries if entry not in had]
    revoked = [entry for entry in had if entry not in desired.entries]
    changes: list[tuple[str, object]] = []
    if granted:
        entries = map(entry_to_wire, granted)
        changes.append(("Grant", admin.GrantRequest(name=desired.name, entries=entries)))
    if revoked:
        entries = map(entry_to_wire, revoked)
        changes.append(("Revoke", admin.RevokeRequest(name=desired.name, entries=entries)))
    altered = admin.AlterUserRequest(name=desired.name)
    if desired.enabled != current.enabled:
        altered.state = ENABLED if desired.enabled else DISABLED
    if desired.networks != tuple(current.networks):
        altered.networks.extend(desired.networks)
        altered.any_network = not desired.networks
    if altered.state or altered.networks or altered.any_network:
        changes.append(("AlterUser", altered))
    return changes


def _of_wire(entry: admin.UserEntry) -> PolicyEntry:
    return PolicyEntry(
        tuple(entry.resources), tuple(entry.actions), tuple(entry.networks), entry.deny
    )


def entry_to_wire(entry: PolicyEntry) -> admin.UserEntry:
    return admin.UserEntry(
        resources=entry.resources,
        actions=entry.actions,
        networks=entry.networks,
        deny=entry.deny,
    )


def annotation(manifest: Manifest, name: str) -> str:
    return str(at(manifest, "metadata", "annotations", name) or "")
