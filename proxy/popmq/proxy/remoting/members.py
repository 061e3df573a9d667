"""The members of consumer groups at this proxy, and what the owner says of all proxies' members.

Consumers that share queues out by themselves must see the same list at every proxy, so the list of
the owner counts (broker/operations/group_members.py): this proxy reports its own consumers there
and waits for changes, and tells its consumers of a group that it has changed.  A list that may lack
members is not given out: each consumer keeps the queues that it has until a whole list is there.
One that has just joined waits for that list, because some clients report a refusal as an error.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from popmq.common.clock import Clock
from popmq.common.errors import PopmqError, Unavailable
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire.pull_pb2 import MemberGroup, MembersReply, MembersRequest
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.remoting.owner_wait import WAIT_MS, OwnerWait

logger = logging.getLogger(__name__)

STALE_MS = 5_000  # without a word of the owner its last list may be wrong
NOTIFY_MS = 1_000  # between two notices of one group: each makes clients balance

PATIENCE_MS = 2_000  # with the list; clients wait for 3 s

Notify = Callable[[str], None]


class _Asked(NamedTuple):
    group: str
    client_id: str
    until_ms: int
    answer: Callable[[Sequence[str] | PopmqError], None]


class GroupMembership(OwnerWait):
    """`notify(group)` tells the consumers of a group at this proxy that its list has changed."""

    def __init__(self, brokers: BrokerPorts, clock: Clock, notify: Notify) -> None:
        super().__init__(brokers)
        self._clock = clock
        self._notify = notify
        self._name = secrets.token_hex(8)
        # How many connections of this proxy a client is in a group with.
        self._own: dict[str, Counter[str]] = {}
        self._lists: dict[str, tuple[str, ...]] = {}
        self._settled = False
        self._version = 0
        self._answered_ms: int | None = None
        self._changed = True  # the owner has not seen `_own` as it is
        self._due: dict[str, int] = {}  # notices that wait, and when they may leave
        self._sent: dict[str, int] = {}  # when the last one of a group left
        self._asked: list[_Asked] = []

    def join(self, group: str, client_id: str) -> None:
        own = self._own.setdefault(group, Counter())
        own[client_id] += 1
        if own[client_id] == 1:
            self._report()

    def leave(self, group: str, client_id: str) -> None:
        own = self._own.get(group)
        if own is None or not own[client_id]:
            return
        own[client_id] -= 1
        if not own[client_id]:
            del own[client_id]
            if not own:
                del self._own[group]
                for table in (self._lists, self._due, self._sent):
                    table.pop(group, None)
            self._report()

    def members(self, group: str, client_id: str) -> Sequence[str]:
        """All members, the asker among them.  Raises Unavailable for a list that may lack some."""
        now_ms = self._clock.boot_ms()
        known = self._lists.get(group)
        fresh = self._answered_ms is not None and now_ms - self._answered_ms < STALE_MS
        if not (self._settled and fresh and known is not None and client_id in known):
            raise Unavailable(
                f"the members of group {group} are not known for sure now: keep what you have"
            )
        return known

    def when_known(
        self, group: str, client_id: str, answer: Callable[[Sequence[str] | PopmqError], None]
    ) -> None:
        """As `members`, but a member waits for a whole list, for at most PATIENCE_MS."""
        is_member = client_id in self._own.get(group, ())
        until_ms = self._clock.boot_ms() + PATIENCE_MS * is_member
        self._asked.append(_Asked(group, client_id, until_ms, answer))
        self._answer_known()

    def _answer_known(self) -> None:
        asked, self._asked = self._asked, []
        now_ms = self._clock.boot_ms()
        for request in asked:
            try:
                request.answer(self.members(request.group, request.client_id))
            except Unavailable as error:
                if now_ms < request.until_ms and request.client_id in self._own.get(
                    request.group, ()
                ):
                    self._asked.append(request)
                else:
                    request.answer(error)

    def _report(self) -> None:
        """The owner gets the list of now instead of the one of before."""
        self._changed = True
        self.cancel()
        self.ask_again()

    def ask_owner(self) -> None:
        owner = self._brokers.owner()
        if not owner:
            return
        groups = [MemberGroup(name=name, client_ids=ids) for name, ids in self._own.items()]
        request = MembersRequest(
            proxy=self._name,
            version=self._version,
            wait_ms=WAIT_MS,
            changed=self._changed,
            groups=groups if self._changed else (),
        )
        self._changed = False
        try:
            port = self._brokers.port(owner)
        except PopmqError:
            self._changed = True
            return
        self.wait_at(owner, port, Kind.MEMBERS, request.SerializeToString(), self._take)

    def cancel(self) -> None:
        if self._waiting is not None:
            self._changed = True  # it may not have arrived
        super().cancel()

    def _take(self, answer: bytes | PopmqError) -> None:
        try:
            reply = None if isinstance(answer, PopmqError) else MembersReply.FromString(answer)
        except DecodeError:
            logger.error("the owner's list of members cannot be read")
            reply = None
        if reply is None or reply.unknown:
            self._changed, self._version = True, 0
            self._settled = self._settled and reply is None
            return
        self._version = reply.version
        self._answered_ms = self._clock.boot_ms()
        was_settled, self._settled = self._settled, reply.settled
        for group in reply.groups:
            members = tuple(group.client_ids)
            if self._lists.get(group.name) != members or (reply.settled and not was_settled):
                self._lists[group.name] = members
                if reply.settled:
                    last_ms = self._sent.get(group.name)
                    due_ms = self._answered_ms if last_ms is None else last_ms + NOTIFY_MS
                    self._due.setdefault(group.name, due_ms)
        self._answer_known()
        self._send_notices()
        if self.runs:
            asyncio.get_running_loop().call_soon(self.ask_again)

    def look(self) -> None:
        super().look()
        self._answer_known()
        self._send_notices()

    def _send_notices(self) -> None:
        now_ms = self._clock.boot_ms()
        for group, due_ms in list(self._due.items()):
            if due_ms <= now_ms:
                del self._due[group]
                self._sent[group] = now_ms
                self._notify(group)
