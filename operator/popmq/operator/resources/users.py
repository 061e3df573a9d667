"""Secrets of a cluster with users: the keys that seal their secrets, and the Super user `admin`.

Both are created once and never overwritten.  Only proxies mount them.
"""

import base64
import json
import secrets

from popmq.common.signing import ACCESS_KEY_FIELD, SECRET_FIELD, Signer
from popmq.operator.model.manifest import SECRET, Manifest, make
from popmq.operator.model.names import FIRST_USER_ANNOTATION
from popmq.operator.model.spec import ClusterSpec
from popmq.operator.model.stages import UsersUse

USERS_FOLDER = "/etc/popmq-users"
KEYS_FILE, ADMIN_FILE = "keys", "admin.json"  # in the folder, and in their Secrets
VOLUME = "users"
FILE_MODE = 0o440  # for the pod's group
ADMIN = "admin"
KEY_BYTES, SECRET_BYTES = 32, 20


def user_secrets(spec: ClusterSpec) -> list[Manifest]:
    """New ones, for a cluster that lacks them."""
    names, labels = spec.names, spec.names.labels()
    key = make(SECRET, names.users_key, spec.namespace, labels)
    if spec.users_use is UsersUse.FIRST:
        key["metadata"]["annotations"] = {FIRST_USER_ANNOTATION: "true"}
    key["type"] = "Opaque"
    key["data"] = _encoded({KEYS_FILE: f"k1 {secrets.token_hex(KEY_BYTES)}\n"})
    admin = make(SECRET, names.admin_user, spec.namespace, labels)
    admin["type"] = "Opaque"
    admin["data"] = credentials(Signer(ADMIN, new_secret()), with_file=True)
    return [key, admin]


def new_secret() -> str:
    return secrets.token_hex(SECRET_BYTES)


def credentials(signer: Signer, *, with_file: bool = False) -> dict[str, str]:
    """The data of a Secret; `with_file`: also as the file that auth.admin_file names."""
    values = {ACCESS_KEY_FIELD: signer.access_key, SECRET_FIELD: signer.secret}
    return _encoded({**values, **({ADMIN_FILE: json.dumps(values)} if with_file else {})})


def signer_in(secret: Manifest | None) -> Signer | None:
    """The user of such a Secret; None where it holds none."""
    data = (secret or {}).get("data") or {}
    try:
        values = [
            base64.b64decode(data[field], validate=True).decode("ascii")
            for field in (ACCESS_KEY_FIELD, SECRET_FIELD)
        ]
    except (KeyError, ValueError):
        return None
    return Signer(*values) if all(values) else None


def user_mounts(spec: ClusterSpec) -> list[Manifest]:
    if spec.users_use is UsersUse.NONE:
        return []
    return [{"name": VOLUME, "mountPath": USERS_FOLDER, "readOnly": True}]


def user_volumes(spec: ClusterSpec) -> list[Manifest]:
    if spec.users_use is UsersUse.NONE:
        return []
    parts = [(spec.names.users_key, KEYS_FILE)]
    if spec.users_use is UsersUse.FIRST:
        parts.append((spec.names.admin_user, ADMIN_FILE))
    sources = [
        {"secret": {"name": name, "items": [{"key": file, "path": file}]}} for name, file in parts
    ]
    return [{"name": VOLUME, "projected": {"sources": sources, "defaultMode": FILE_MODE}}]


def mounts_users(deployment: Manifest | None) -> bool:
    """Whether the proxies of that Deployment hold the keys."""
    pod = (((deployment or {}).get("spec") or {}).get("template") or {}).get("spec") or {}
    return any(volume.get("name") == VOLUME for volume in pod.get("volumes") or [])


def _encoded(values: dict[str, str]) -> dict[str, str]:
    return {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
