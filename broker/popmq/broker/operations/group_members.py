"""GroupMembers: which consumers share the queues of a group out among themselves.

Such consumers, those of the Remoting protocol, each take their part of the queues by the list of
all members, so every proxy must have the same list.  Each reports its own to the master of the
broker group that owns the topics, and waits there for changes.  This is memory only: a new master
learns it from the proxies, and calls the lists settled when all have had the time to report.

Invariant: a group's list is what the latest reports say; its version grows when it changes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from popmq.common.errors import TooManyRequests

SETTLE_MS = 3_000  # a proxy that is alive has asked again by then
ABSENT_MS = 5_000  # a proxy that did not ask for so long is gone, and its consumers with it
WAITING_LIMIT = 1_024
MEMBERS_LIMIT = 100_000

Members = Mapping[str, Sequence[str]]


class MemberList(NamedTuple):
    """`groups` are those that the proxy has members of, with all their members, sorted."""

    version: int
    settled: bool
    unknown: bool
    groups: Members


Answer = Callable[[MemberList], None]


@dataclass(slots=True)
class _Proxy:
    heard_ms: int
    groups: dict[str, frozenset[str]] = field(default_factory=dict)


class _Waiter(NamedTuple):
    proxy: str
    version: int
    deadline_ms: int
    answer: Answer


class GroupMembers:
    def __init__(self) -> None:
        self._proxies: dict[str, _Proxy] = {}
        self._versions: dict[str, int] = {}  # of each group
        self._version = 0
        self._began_ms: int | None = None  # when the first proxy reported
        self._settled = False
        self._waiting: dict[int, _Waiter] = {}

    def ask(
        self,
        number: int,
        proxy: str,
        changed: Members | None,
        version: int,
        *,
        wait_ms: int,
        now_ms: int,
        answer: Answer,
    ) -> None:
        """A proxy reports its members, if they have changed, and hears of changes after `version`;
        `answer` comes at once or within `wait_ms`."""
        if len(self._waiting) >= WAITING_LIMIT:
            raise TooManyRequests(f"{WAITING_LIMIT} proxies wait for members of groups already")
        known = self._proxies.get(proxy)
        if known is None and changed is None:
            answer(MemberList(self._version, False, True, {}))
            return
        if self._began_ms is None:
            self._began_ms = now_ms
        if known is None:
            known = self._proxies[proxy] = _Proxy(now_ms)
        known.heard_ms = now_ms
        if changed is not None:
            self._replace(known, changed)
        self._waiting[number] = _Waiter(proxy, version, now_ms + wait_ms, answer)
        self._answer_changed(now_ms)

    def cancel(self, number: int) -> None:
        self._waiting.pop(number, None)

    def step(self, now_ms: int) -> None:
        """Forget proxies that are gone, and end the waits whose time is over."""
        waiting = {waiter.proxy for waiter in self._waiting.values()}
        for name, proxy in list(self._proxies.items()):
            if name not in waiting and now_ms - proxy.heard_ms > ABSENT_MS:
                self._replace(proxy, {})
                del self._proxies[name]
        if not self._proxies:
            self._began_ms = None
        self._answer_changed(now_ms)

    def dismiss(self) -> None:
        """The broker stops: everybody is answered, and asks the next master."""
        for number in list(self._waiting):
            waiter = self._waiting.pop(number)
            waiter.answer(MemberList(waiter.version, False, True, {}))

    def check_invariants(self) -> None:
        groups = {name for proxy in self._proxies.values() for name in proxy.groups}
        assert groups <= self._versions.keys(), "a group without a version"
        assert all(version <= self._version for version in self._versions.values())

    def _replace(self, proxy: _Proxy, members: Members) -> None:
        """Its list from now on; groups whose members differ get a new version."""
        count = sum(map(len, members.values()))
        others = sum(
            len(ids)
            for known_proxy in self._proxies.values()
            for ids in known_proxy.groups.values()
        )
        if count and count + others > 2 * MEMBERS_LIMIT:
            raise TooManyRequests(f"{MEMBERS_LIMIT} members of groups are the limit of a cluster")
        new = {name: frozenset(ids) for name, ids in members.items()}
        touched = [
            name
            for name in proxy.groups.keys() | new.keys()
            if proxy.groups.get(name) != new.get(name)
        ]
        proxy.groups = new
        if touched:
            self._version += 1
            self._versions |= dict.fromkeys(touched, self._version)
            for name in touched:
                if not any(name in known_proxy.groups for known_proxy in self._proxies.values()):
                    del self._versions[name]

    def _answer_changed(self, now_ms: int) -> None:
        settled = self._began_ms is not None and now_ms - self._began_ms >= SETTLE_MS
        just_settled = settled and not self._settled
        self._settled = settled
        for number, waiter in list(self._waiting.items()):
            proxy = self._proxies[waiter.proxy]
            newest = max((self._versions[name] for name in proxy.groups), default=0)
            if just_settled or newest > waiter.version or now_ms >= waiter.deadline_ms:
                del self._waiting[number]
                proxy.heard_ms = now_ms
                groups = {name: self._members(name) for name in proxy.groups}
                waiter.answer(MemberList(self._version, settled, False, groups))

    def _members(self, group: str) -> Sequence[str]:
        lists: Iterable[frozenset[str]] = (
            proxy.groups.get(group, frozenset()) for proxy in self._proxies.values()
        )
        return sorted(frozenset().union(*lists))
