"""What is asked of the API server before anything else: a cluster's Secrets, by their names."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field

from popmq.common.protocol.frames import FrameSettings
from popmq.common.signing import Signer
from popmq.operator.cluster.secret_stage import SecretStage, StoredSecret, stored_secret
from popmq.operator.kube.api_client import ApiClient
from popmq.operator.model.certificates import TRUSTED, SecretData
from popmq.operator.model.manifest import SECRET, at, is_owned_by
from popmq.operator.model.spec import ClusterSpec, SecretUse
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
    desired = {"Own": (spec.names.authority, spec.names.tls), "Secret": (spec.tls.secret,)}
    for name in desired.get(spec.tls.mode, ()):
        secret = await api.get(SECRET, spec.namespace, name)
        # In mode Own, a Secret that somebody else made is no authority of this cluster.
        if secret is not None and (spec.tls.mode == "Secret" or is_owned_by(secret, spec.uid)):
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
    secrets: Mapping[str, SecretData], stored: StoredSecret, stage: SecretStage, signer: Signer
) -> PlaneAccess:
    required = stored.secret is not None and stage.use is SecretUse.REQUIRED
    frames = FrameSettings(secret=stored.secret, secret_required=required)
    return PlaneAccess(trusted_of(secrets), frames, signer)


def trusted_of(secrets: Mapping[str, SecretData]) -> bytes | None:
    """Who signed the proxies' certificate, as PEM."""
    found_secrets = next(
        (secret[TRUSTED] for secret in secrets.values() if TRUSTED in secret), None
    )
    return base64.b64decode(found_secrets) if found_secrets else None
