"""Users and their policies: the values, their limits, and the texts that people write.

A resource is written `cluster`, `namespace:NAME`, `topic:NAME` or `group:NAME`; a name may end in
`*`, and `*` alone is every name (docs/concepts/users.md).
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum

from popmq.common.errors import Code, PopmqError, Refused

USER_NAME = re.compile(r"[a-z0-9._-]{1,64}")
RESOURCE_KINDS = ("cluster", "namespace", "topic", "group")
ACTIONS = ("pub", "sub", "create", "update", "delete", "get", "list")
USER_LIMIT = 10_000
SECRET_LIMIT = 2
ENTRY_LIMIT = 256
LIST_LIMIT = 64  # resources or networks of an entry, networks or clock offsets of a user
PATTERN_LIMIT = 255
SECRET_BYTES = (16, 256)
# Of a client's clock against UTC, in minutes: all time zones are a multiple of 15.
CLOCK_OFFSETS = (-12 * 60, 14 * 60)
CLOCK_STEP = 15
_RESOURCE_NAME = re.compile(r"[%|a-zA-Z0-9_-]{0,254}\*?")


class AuthMode(Enum):
    """Whether callers must prove who they are; one for the whole cluster."""

    OFF = "off"
    OBSERVE = "observe"  # nothing is refused; what would be is counted and logged
    ON = "on"


@dataclass(frozen=True, slots=True)
class SealedSecret:
    """A secret as records hold it. `key` names the sealing key; `until_ms` 0: no end."""

    id: str
    key: str
    nonce: bytes
    sealed: bytes
    until_ms: int = 0


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """Allows or denies actions on resources; `networks` are those of the callers, none: all."""

    resources: tuple[str, ...]
    actions: tuple[str, ...]
    networks: tuple[str, ...] = ()
    deny: bool = False

    def __str__(self) -> str:
        where = f" from {','.join(self.networks)}" if self.networks else ""
        effect = "deny" if self.deny else "allow"
        return f"{effect} {','.join(self.actions)} on {','.join(self.resources)}{where}"


@dataclass(frozen=True, slots=True)
class Quotas:
    """What one user may use; 0: no limit. Rates and connections are those at each proxy."""

    connections: int = 0
    calls: int = 0  # a second
    bytes: int = 0  # a second, of requests and answers
    topics: int = 0  # that it created
    groups: int = 0
    queues: int = 0  # of those topics

    def limits(self) -> dict[str, int]:
        return {name: limit for name, limit in asdict(self).items() if limit}

    def setting(self, user: str, name: str) -> str:
        """How a refusal names the limit, and what changes it."""
        return f"popmq user alter {user} --quota {name}={getattr(self, name)}"


QUOTA_NAMES = tuple(field.name for field in fields(Quotas))
QUOTA_LIMIT = 1 << 40


def quotas_of(limits: Mapping[str, int]) -> Quotas:
    """Those that this version knows."""
    return Quotas(**{name: limit for name, limit in limits.items() if name in QUOTA_NAMES})


def check_quotas(limits: Mapping[str, int]) -> None:
    """Raises BAD_REQUEST for a name that is no quota, or a limit that is none."""
    for name, limit in limits.items():
        if name not in QUOTA_NAMES:
            raise _refused(f"{name[:40]!r} is no quota: {', '.join(QUOTA_NAMES)}")
        if limit > QUOTA_LIMIT:
            raise _refused(f"a quota of {limit} {name}: 1 to {QUOTA_LIMIT}, 0 for none")


@dataclass(frozen=True, slots=True)
class UserConfig:
    """`version` is the change of the users' table that wrote it last."""

    name: str
    is_super: bool = False
    disabled: bool = False
    secrets: tuple[SealedSecret, ...] = ()
    entries: tuple[PolicyEntry, ...] = ()
    networks: tuple[str, ...] = ()  # that it may call from; none: all
    clock_offsets: tuple[int, ...] = ()  # of its clients' clocks against UTC, in minutes
    learns_clock: bool = True  # the first success sets the offset
    version: int = 0
    quotas: Quotas = Quotas()


def check_user(user: UserConfig) -> None:
    """Raises BAD_REQUEST with the value and the limit."""
    check_user_name(user.name)
    if len(user.secrets) > SECRET_LIMIT:
        raise _refused(f"user {user.name} with {len(user.secrets)} secrets: at most {SECRET_LIMIT}")
    if len(user.entries) > ENTRY_LIMIT:
        raise _refused(
            f"user {user.name} with {len(user.entries)} policy entries: at most {ENTRY_LIMIT}"
        )
    for entry in user.entries:
        check_entry(entry)
    check_networks(user.networks)
    if len(user.clock_offsets) > LIST_LIMIT:
        raise _refused(f"{len(user.clock_offsets)} clock offsets: at most {LIST_LIMIT}")
    for offset in user.clock_offsets:
        check_clock_offset(offset)


def check_user_name(name: str) -> None:
    if not USER_NAME.fullmatch(name):
        raise _refused(f"{name[:100]!r} is no user's name: 1 to 64 of a-z, 0-9, '.', '_' and '-'")


def check_entry(entry: PolicyEntry) -> None:
    if not 1 <= len(entry.resources) <= LIST_LIMIT:
        raise _refused(f"a policy entry with {len(entry.resources)} resources: 1 to {LIST_LIMIT}")
    if not 1 <= len(entry.actions) <= len(ACTIONS):
        raise _refused(f"a policy entry with {len(entry.actions)} actions: 1 to {len(ACTIONS)}")
    for resource in entry.resources:
        split_resource(resource)
    for action in entry.actions:
        check_action(action)
    check_networks(entry.networks)


def split_resource(text: str) -> tuple[str, str]:
    """Its kind and the pattern of its name; "" for the cluster. Raises BAD_REQUEST."""
    kind, colon, pattern = text.partition(":")
    good = bool(pattern) and len(pattern) <= PATTERN_LIMIT and _RESOURCE_NAME.fullmatch(pattern)
    if kind not in RESOURCE_KINDS or (not good if kind != "cluster" else bool(colon)):
        raise _refused(
            f"{text[:100]!r} is no resource: cluster, namespace:NAME, topic:NAME or group:NAME, "
            "where a name may end in *"
        )
    return kind, pattern


def check_action(action: str) -> None:
    if action not in ACTIONS:
        raise _refused(f"{action[:40]!r} is no action: {', '.join(ACTIONS)}")


def check_networks(networks: Sequence[str]) -> None:
    if len(networks) > LIST_LIMIT:
        raise _refused(f"{len(networks)} source networks: at most {LIST_LIMIT}")
    for network in networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise _refused(
                f"{network[:60]!r} is no network, such as 10.1.0.0/16: {error}"
            ) from error


def check_clock_offset(minutes: int) -> None:
    low, high = CLOCK_OFFSETS
    if not low <= minutes <= high or minutes % CLOCK_STEP:
        raise _refused(
            f"a clock offset of {format_clock_offset(minutes)}: quarters of an hour from "
            f"{format_clock_offset(low)} to {format_clock_offset(high)}"
        )


def parse_clock_offset(text: str) -> int:
    """`+05:45` in minutes. Raises BAD_REQUEST."""
    matched = re.fullmatch(r"([+-])([0-9]{2}):([0-9]{2})", text)
    if matched is None or int(matched[3]) >= 60:
        raise _refused(f"{text[:40]!r} is no clock offset: write it as +05:45 or -03:30")
    minutes = int(matched[2]) * 60 + int(matched[3])
    minutes = -minutes if matched[1] == "-" else minutes
    check_clock_offset(minutes)
    return minutes


def format_clock_offset(minutes: int) -> str:
    sign = "-" if minutes < 0 else "+"
    return f"{sign}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"


def unique(values: Iterable[str]) -> tuple[str, ...]:
    """In their order, each once."""
    return tuple(dict.fromkeys(values))


def _refused(message: str) -> PopmqError:
    return Refused(Code.BAD_REQUEST, message)
