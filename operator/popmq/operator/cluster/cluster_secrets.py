"""What is asked of the API server before anything else: a cluster's Secrets, by their names."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field

from popmq.common.errors import ConfigError
from popmq.common.protocol.frame_tls import FrameTls
from popmq.common.protocol.frames import FrameSettings
from popmq.common.signing import Signer
from popmq.operator.cluster.cluster_certificates import PROCESS_NAME
from popmq.operator.cluster.secret_stage import SecretStage, StoredSecret, stored_secret
from popmq.operator.kube.api_client import ApiClient
from popmq.operator.model.certificates import CERTIFICATE, KEY, TRUSTED, SecretData
from popmq.operator.model.manifest import SECRET, at, is_owned_by
from popmq.operator.model.spec import ClusterSpec
from popmq.operator.model.stages import PeerRequirement
from popmq.operator.resources.pods import SECRET_KEY


@dataclass(frozen=True, slots=True)
class PlaneAccess:
    """How the operator and a cluster know each other: `trusted` signed the proxies' certificate
    (PEM), `frames` has what is proved to controllers and asked of them, `signer` the user that
    calls proxies where they have users."""

    trusted: bytes | None = None
    frames: FrameSettings = field(default_factory=lambda: FrameSettings(secret_required=False))
    signer: Signer = field(default_factory=Signer)


async def secrets_of(api: ApiClient, spec: ClusterSpec) -> dict[str, SecretData]:
    """By name, so that no right to list Secrets is needed."""
    secrets = {}
    names = spec.names
    desired = {"Own": (names.authority, names.tls), "Secret": (spec.tls.secret,)}
    process_tls = () if spec.tls_use is PeerRequirement.NONE else (names.process_tls,)
    for name in (*desired.get(spec.tls.mode, ()), *process_tls):
        secret = await api.get(SECRET, spec.namespace, name)
        # A Secret that somebody else made is no authority of this cluster.
        of_user = spec.tls.mode == "Secret" and name == spec.tls.secret
        if secret is not None and (of_user or is_owned_by(secret, spec.uid)):
            secrets[name] = secret.get("data") or {}
    return secrets


async def cluster_secret_of(api: ApiClient, spec: ClusterSpec) -> StoredSecret:
    name = spec.names.cluster_secret
    secret = await api.get(SECRET, spec.namespace, name)
    if secret is None:
        return StoredSecret()
    encoded = (secret.get("data") or {}).get(SECRET_KEY)
    try:
        text = None if encoded is None else base64.b64decode(encoded, validate=True)
    except binascii.Error:
        text = b""
    return stored_secret(
        text,
        owned=is_owned_by(secret, spec.uid),
        created=str(at(secret, "metadata", "creationTimestamp") or ""),
        name=name,
    )


def plane_access(
    spec: ClusterSpec,
    secrets: Mapping[str, SecretData],
    stored: StoredSecret,
    stage: SecretStage,
    signer: Signer,
) -> PlaneAccess:
    required = stored.secret is not None and stage.use is PeerRequirement.REQUIRED
    tls = _frame_tls(secrets.get(spec.names.process_tls, {}), spec.tls_use)
    frames = FrameSettings(secret=stored.secret, secret_required=required, tls=tls)
    return PlaneAccess(trusted_of(spec, secrets), frames, signer)


def _frame_tls(process: SecretData, use: PeerRequirement) -> FrameTls | None:
    """None also while the Secret is missing or damaged: it is made again."""
    if use is PeerRequirement.NONE or not {CERTIFICATE, KEY, TRUSTED} <= process.keys():
        return None
    try:
        parts = [base64.b64decode(process[key]) for key in (CERTIFICATE, KEY, TRUSTED)]
        required = use is PeerRequirement.REQUIRED
        return FrameTls.of_pem(*parts, name=PROCESS_NAME, required=required)
    except (binascii.Error, ConfigError):
        return None


def trusted_of(spec: ClusterSpec, secrets: Mapping[str, SecretData]) -> bytes | None:
    """Who signed the proxies' certificate, as PEM."""
    names = (spec.names.authority, spec.names.tls, spec.tls.secret)
    encoded = next(
        (secrets[name][TRUSTED] for name in names if TRUSTED in secrets.get(name, {})), ""
    )
    return base64.b64decode(encoded) if encoded else None
