"""How the API server is reached: the official client's configuration, of a pod or a kubeconfig.

Tokens are renewed as the configuration says: files are read again, exec plug-ins run again.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import (
    ConfigException,
    load_incluster_config,
    load_kube_config,
)

from popmq.common.errors import ConfigError

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
CONNECTIONS = 1000  # each watch of a kind in a namespace has one
RENEW_S = 30.0  # a token of a file or a plug-in is asked for again after this


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """`namespace` is that of the pod, or of the kubeconfig's context."""

    configuration: Configuration
    namespace: str


async def find_access(kubeconfig: str) -> ApiAccess:
    """Of the kubeconfig that is named, else of the pod that this is.  Raises ConfigError."""
    return await kubeconfig_access(kubeconfig) if kubeconfig else pod_access()


def pod_access() -> ApiAccess:
    configuration = Configuration()
    configuration.connection_pool_maxsize = CONNECTIONS
    try:
        load_incluster_config(client_configuration=configuration)
        namespace = NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except (ConfigException, OSError) as error:
        raise ConfigError(
            f"this is no pod of a Kubernetes cluster ({error}): "
            "name a kubeconfig file (operator.kubeconfig)"
        ) from error
    return ApiAccess(configuration, namespace)


async def kubeconfig_access(path: str) -> ApiAccess:
    """The current context of a kubeconfig: a token, a token file, a certificate or a plug-in."""
    configuration = Configuration()
    configuration.connection_pool_maxsize = CONNECTIONS
    try:
        loader = await load_kube_config(
            config_file=path, client_configuration=configuration, persist_config=False
        )
        context = loader.current_context["context"]
        user = loader._user or {}  # the client does not say what kind of credentials it loaded
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
        *(ConfigException, yaml.YAMLError),
    ) as error:
        raise ConfigError(f"operator.kubeconfig = {path} cannot be used: {error!r}") from error
    if "exec" in user and not (configuration.api_key or configuration.cert_file):
        # The client logs that and would go on without credentials.
        command = user["exec"].safe_get("command")
        raise ConfigError(
            f"operator.kubeconfig = {path}: the exec plug-in {command} gave no credentials"
        )
    loaded_s = time.monotonic()

    async def renew(configuration: Configuration) -> None:
        nonlocal loaded_s
        if time.monotonic() >= loaded_s + RENEW_S:
            loaded_s = time.monotonic()
            await loader.load_and_set(configuration)

    # The client declares the hook as None, which it is until somebody sets it.
    configuration.refresh_api_key_hook = renew  # type: ignore[assignment]
    return ApiAccess(configuration, str(context.get("namespace") or "default"))
