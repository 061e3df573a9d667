"""Contexts: endpoints with a name, kept in a file of the user's (`popmq context`).

An endpoint comes from --endpoint, else POPMQ_ENDPOINT, else the context that is used, else it is
the address at which `popmq up` listens.  An admin endpoint belongs to the endpoint of the same
source: changes must not go to another cluster than the one that was named.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from popmq.common.address import parse_address
from popmq.common.errors import ConfigError
from popmq.common.signing import ACCESS_KEY_VARIABLE, SECRET_VARIABLE, Signer

ENDPOINT_VARIABLE = "POPMQ_ENDPOINT"
ADMIN_ENDPOINT_VARIABLE = "POPMQ_ADMIN_ENDPOINT"
TLS_CA_VARIABLE = "POPMQ_TLS_CA"
OVER_TLS = "tls://"
UNIX = "unix:"
DEFAULT_ENDPOINT = "127.0.0.1:8081"


@dataclass(frozen=True, slots=True)
class Connection:
    """Where a proxy is. `tls_ca` names a PEM file, empty for what the system trusts.

    `admin_endpoint` may be unix:PATH; empty: what the endpoint names, or itself.  Without an access
    key calls are not signed.
    """

    endpoint: str
    tls_ca: str = ""
    namespace: str = ""
    admin_endpoint: str = ""
    access_key: str = ""
    secret: str = field(default="", repr=False)

    @property
    def signer(self) -> Signer:
        return Signer(self.access_key, self.secret)


@dataclass(frozen=True, slots=True)
class Contexts:
    """Those of the file, and the name of the one that is used; empty: none is."""

    known: Mapping[str, Connection]
    used: str = ""

    def named(self, name: str) -> Connection:
        """ConfigError when there is no such context."""
        if name not in self.known:
            names = ", ".join(sorted(self.known)) or "none"
            raise ConfigError(f"no context {name!r}: `popmq context list` has {names}")
        return self.known[name]


def check_endpoint(text: str) -> str:
    """Raises ConfigError with what to write instead."""
    for scheme in ("http://", "https://"):
        if text.startswith(scheme):
            rest = text.removeprefix(scheme).rstrip("/")
            requested = f"{OVER_TLS}{rest}" if scheme == "https://" else rest
            raise ConfigError(f"{text!r}: an endpoint has no {scheme}: write {requested}")
    _, port = parse_address(text.removeprefix(OVER_TLS))
    if port == 0:
        raise ConfigError(f"{text!r}: no proxy listens on port 0")
    return text


def check_admin_endpoint(text: str) -> str:
    """The same, or unix:PATH."""
    return text if text.startswith(UNIX) and text != UNIX else check_endpoint(text)


def contexts_path() -> str:
    """Below XDG_CONFIG_HOME, else below ~/.config."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(folder, "popmq", "contexts.json")


def read_contexts() -> Contexts:
    path = contexts_path()
    if not os.path.exists(path):
        return Contexts({})
    import json

    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        known = {name: Connection(**fields) for name, fields in content["contexts"].items()}
        return Contexts(known, str(content["used"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def write_contexts(contexts: Contexts) -> None:
    import json

    path = contexts_path()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # Without what is empty, so that an earlier popmq reads the file as long as it can.
    known = {
        name: {key: value for key, value in asdict(connection).items() if value}
        for name, connection in contexts.known.items()
    }
    # It may hold secrets, so it is for its owner alone.
    descriptor = os.open(f"{path}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"used": contexts.used, "contexts": known}, file, indent=1)
    os.replace(f"{path}.tmp", path)


def connection_of(
    endpoint: str | None, context: str | None, admin_endpoint: str | None = None
) -> Connection:
    """What the options say, then the environment, then the context that is used."""
    environ = os.environ
    contexts = read_contexts()
    if context is not None:
        connection = contexts.named(context)
    elif contexts.used in contexts.known:
        connection = contexts.known[contexts.used]
    else:
        connection = Connection(DEFAULT_ENDPOINT)
    given = endpoint or (context is None and environ.get(ENDPOINT_VARIABLE)) or ""
    if given:
        # Another server than the context's: its certificates, namespace and user are not meant.
        connection = Connection(given)
    if environ.get(ACCESS_KEY_VARIABLE):
        access_key, secret = environ[ACCESS_KEY_VARIABLE], environ.get(SECRET_VARIABLE, "")
        connection = replace(connection, access_key=access_key, secret=secret)
    from_environment = context is None and not endpoint and environ.get(ADMIN_ENDPOINT_VARIABLE)
    admin = admin_endpoint or from_environment or connection.admin_endpoint
    return replace(
        connection,
        endpoint=check_endpoint(connection.endpoint),
        tls_ca=environ.get(TLS_CA_VARIABLE) or connection.tls_ca,
        admin_endpoint=check_admin_endpoint(admin) if admin else "",
    )
