"""Policies: what a user may, from its entries.

A matching Deny always wins, whatever its place and width; without a match the answer is no.  A
Super user needs no Allow, and is bound by a Deny.  Decisions are kept by the user as it is: a
changed user is another object, so no decision outlives a change.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from popmq.common.namespaces import namespace_of_name
from popmq.common.topics import split_group_topic
from popmq.common.users import PolicyEntry, UserConfig, split_resource

DECISIONS_KEPT = 4_096
NEEDS_KEPT = 16_384
# No topic or group can have these names.
EVERY = "*"  # all that there are: an entry for a part of them does not allow it, a Deny forbids it
SOME = "?"  # at least one: what is not allowed is left out of the answer

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Need(NamedTuple):
    """Any one of the actions suffices. `kind` is cluster, topic or group."""

    actions: tuple[str, ...]
    kind: str
    name: str = ""

    def __str__(self) -> str:
        if self.kind == "cluster":
            where = "the cluster"
        elif self.name in (EVERY, SOME):
            where = f"{'every' if self.name == EVERY else 'any'} {self.kind}"
        else:
            where = f"{self.kind} {self.name}"
        return f"{' or '.join(self.actions)} on {where}"


class Decision(NamedTuple):
    allowed: bool
    reason: str  # the entry that decided, or why there is none


class _Compiled(NamedTuple):
    entry: PolicyEntry
    resources: tuple[tuple[str, str], ...]  # kind, pattern
    networks: tuple[Network, ...]


class Policy:
    def __init__(self, user: UserConfig) -> None:
        self._name = user.name
        self._is_super = user.is_super
        self._entries = [
            _Compiled(
                entry,
                tuple(map(_checked_before, entry.resources)),
                tuple(map(ipaddress.ip_network, entry.networks)),
            )
            for entry in user.entries
        ]
        self._by_network = any(entry.networks for entry in self._entries)
        self._decisions: dict[tuple[Need, str], Decision] = {}

    def decide(self, need: Need, host: str) -> Decision:
        """`host` is the caller's address."""
        key = need, host if self._by_network else ""
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._decide(need, host)
            if len(self._decisions) >= DECISIONS_KEPT:
                self._decisions.clear()
            self._decisions[key] = decision
        return decision

    def covers(self, entry: PolicyEntry) -> bool:
        """Whether the user has every right that the entry gives, wherever it calls from."""
        if self._is_super and not any(item.entry.deny for item in self._entries):
            return True
        return all(
            self._covers(kind, pattern, action)
            for kind, pattern in map(split_resource, entry.resources)
            for action in entry.actions
        )

    def _covers(self, kind: str, pattern: str, action: str) -> bool:
        allowed = self._is_super
        for item in self._entries:
            if action not in item.entry.actions:
                continue
            for own_kind, own in item.resources:
                if item.entry.deny and _overlaps((own_kind, own), (kind, pattern)):
                    return False
                wider = own_kind == kind and _is_wider(own, pattern)
                if not item.entry.deny and not item.networks and wider:
                    allowed = True
        return allowed

    def _decide(self, need: Need, host: str) -> Decision:
        """Each action by itself: a Deny of one leaves the others."""
        if need.name == SOME:
            return self._decide_some(need, host)
        denied: _Compiled | None = None
        for action in need.actions:
            deny, allow = self._matches(action, need, host)
            if deny is not None:
                denied = denied or deny
            elif allow is not None:
                return Decision(True, str(allow.entry))
            elif self._is_super:
                return Decision(True, f"{self._name} is a Super user")
        if denied is not None:
            return Decision(False, str(denied.entry))
        return Decision(False, "no entry allows it")

    def _decide_some(self, need: Need, host: str) -> Decision:
        """An Allow counts unless a Deny takes all of it."""
        if self._is_super and self._decide(need._replace(name=EVERY), host).allowed:
            return Decision(True, f"{self._name} is a Super user")
        for allow in self._on(need, host, deny=False):
            for pattern in _patterns(allow, need.kind):
                denied = (
                    own
                    for deny in self._on(need, host, deny=True)
                    for own in _patterns(deny, need.kind)
                )
                if not any(_is_wider(own, pattern) for own in denied):
                    return Decision(True, str(allow.entry))
        for deny in self._on(need, host, deny=True):
            return Decision(False, str(deny.entry))
        return Decision(False, "no entry allows it")

    def _on(self, need: Need, host: str, *, deny: bool) -> Iterator[_Compiled]:
        for item in self._entries:
            acts = any(action in item.entry.actions for action in need.actions)
            if item.entry.deny is deny and acts and is_within(host, item.networks):
                yield item

    def _matches(
        self, action: str, need: Need, host: str
    ) -> tuple[_Compiled | None, _Compiled | None]:
        """The first entry that denies it, and the first that allows it."""
        deny = allow = None
        for item in self._entries:
            if action not in item.entry.actions or not is_within(host, item.networks):
                continue
            if (allow if not item.entry.deny else deny) is not None:
                continue
            if any(_matches(own, need, deny=item.entry.deny) for own in item.resources):
                if item.entry.deny:
                    deny = item
                else:
                    allow = item
        return deny, allow


def _checked_before(resource: str) -> tuple[str, str]:
    """Kind and pattern of a resource that the owner of users has accepted."""
    kind, _, pattern = resource.partition(":")
    return kind, pattern


def _matches(resource: tuple[str, str], need: Need, *, deny: bool) -> bool:
    kind, pattern = resource
    if kind == "namespace":
        if need.kind == "cluster":
            return False
        if need.name == EVERY:
            return deny
        namespace = namespace_of_name(need.name)
        return bool(namespace) and _covers_name(pattern, namespace)
    if kind != need.kind:
        return False
    if kind == "cluster":
        return True
    if need.name == EVERY:
        return deny or pattern == "*"
    return _covers_name(pattern, need.name)


def _patterns(item: _Compiled, kind: str) -> Iterator[str]:
    """Of names that the entry is about; a namespace is the names that begin with it."""
    for own, pattern in item.resources:
        if own == kind:
            yield pattern
        elif own == "namespace":
            yield pattern if pattern.endswith("*") else f"{pattern}%*"


def _covers_name(pattern: str, name: str) -> bool:
    if pattern.endswith("*"):
        return name.startswith(pattern[:-1])
    return name == pattern


def _is_wider(own: str, pattern: str) -> bool:
    """Whether every name of `pattern` is one of `own`."""
    if not pattern.endswith("*"):
        return _covers_name(own, pattern)
    return own.endswith("*") and pattern[:-1].startswith(own[:-1])


def _overlaps(own: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether a name may be of both; a namespace may hold any topic and any group."""
    if "cluster" in (own[0], other[0]):
        return own[0] == other[0]
    if own[0] != other[0]:
        return "namespace" in (own[0], other[0])
    return _is_wider(own[1], other[1]) or _is_wider(other[1], own[1])


@lru_cache(maxsize=NEEDS_KEPT)
def topic_need(actions: tuple[str, ...], name: str) -> Need:
    """A group's own topics (dead letters, retries, parked messages) belong to the group."""
    group, _ = split_group_topic(name)
    return Need(actions, "group", group) if group else Need(actions, "topic", name)


@lru_cache(maxsize=NEEDS_KEPT)
def group_need(actions: tuple[str, ...], name: str) -> Need:
    return Need(actions, "group", name)


@lru_cache(maxsize=4_096)
def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped if mapped is not None else address


def is_within(host: str, networks: Sequence[Network]) -> bool:
    """Whether the address is in one of the networks; with no networks, every one is."""
    if not networks:
        return True
    address = _address(host)
    return address is not None and any(address in network for network in networks)
