"""Access to an API server of a test, by a token."""

from pathlib import Path

from kubernetes.aio.client import Configuration

from popmq.operator.kube.access import ApiAccess


def token_access(
    url: str, token: str = "operator", namespace: str = "apps", ca_file: Path | None = None
) -> ApiAccess:
    configuration = Configuration(host=url, ssl_ca_cert=str(ca_file) if ca_file else None)
    if token:
        configuration.api_key["BearerToken"] = f"Bearer {token}"
    return ApiAccess(configuration, namespace)
