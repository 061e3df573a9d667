"""What is asked of the API server before anything else: a cluster's Secrets, by their names."""

import base64
from collections.abc import Mapping

from popmq.operator.kube.api_client import ApiClient
from popmq.operator.model.certificates import TRUSTED, SecretData
from popmq.operator.model.manifest import SECRET
from popmq.operator.model.spec import ClusterSpec


async def secrets_of(api: ApiClient, spec: ClusterSpec) -> dict[str, SecretData]:
    """By name, so that no right to list Secrets is needed."""
    found = {}
    wanted = {"Own": (spec.names.authority, spec.names.tls), "Secret": (spec.tls.secret,)}
    for name in wanted.get(spec.tls.mode, ()):
        secret = await api.get(SECRET, spec.namespace, name)
        if secret is not None:
            found[name] = secret.get("data") or {}
    return found


def trusted_of(secrets: Mapping[str, SecretData]) -> bytes | None:
    """Who signed the proxies' certificate, as PEM."""
    found = next((one[TRUSTED] for one in secrets.values() if TRUSTED in one), None)
    return base64.b64decode(found) if found else None
