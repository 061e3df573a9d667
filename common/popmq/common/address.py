"""Addresses of servers as people write them: `host:port`."""

import ipaddress
import re

from popmq.common.errors import ConfigError

PORT_LIMIT = 65_535


def parse_address(text: str) -> tuple[str, int]:
    """`host:port`, an IPv6 host in brackets: `[::1]:8081`. ConfigError for anything else."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{text!r}: put an IPv6 host in brackets, as in [::1]:8081")
    if not colon or not host or not re.fullmatch(r"-?\d{1,20}", port, re.ASCII):
        raise ConfigError(f"{text!r} is not an address: write HOST:PORT, as in 127.0.0.1:8081")
    if not 0 <= int(port) <= PORT_LIMIT:
        raise ConfigError(f"{text!r}: a port is 0 to {PORT_LIMIT}, 0 for any that is free")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """`host:port`, an IPv6 host in brackets; nothing else joins the two."""
    host = host.removeprefix("[").removesuffix("]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Of a peer's address, which a socket gave; "" for a socket without addresses."""
    return address.rpartition(":")[0]


def address_error(value: str) -> str:
    """What is wrong with it, or ""."""
    try:
        parse_address(value)
    except ConfigError as error:
        return str(error)
    return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that host; a name counts only if it is localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
