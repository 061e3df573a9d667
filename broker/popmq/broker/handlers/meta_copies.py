"""MetaCopies: the owner's answers to COPY_META, and which state each broker group has copied (D7).

A deletion is answered when every broker group that follows has copied it, or after COPIED_MS.  So
nothing that is sent or acked after the answer goes into what was deleted, and a name that is made
again is the new one everywhere.  A creation waits for the deletions before it in the same way, for
the case that the answer to the deletion was lost.  Proxies remember a description for less than
COPIED_MS (proxy/brokers/metadata_cache.py), so after that time they name the new topic or group to
a broker group that could not be waited for, which then refuses to store into the old one.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from popmq.broker.core.broker import Broker
from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.topics import META_TOPIC_ID
from popmq.common.wire.admin_pb2 import DeleteTopicRequest
from popmq.common.wire.replication_pb2 import CopyMetaReply, CopyMetaRequest

COPIED_MS = 3_000
FOLLOWS_MS = 10_000  # a broker group that has not asked for so long counts if a controller lists it
LONGEST_WAIT_MS = 5_000

DELETIONS = frozenset((Kind.DELETE_TOPIC, Kind.DELETE_GROUP))
ORDERED = DELETIONS | {Kind.CREATE_TOPIC, Kind.CREATE_GROUP}

_PLACE = (META_TOPIC_ID, 0)  # where this module waits among the long polls
State = tuple[int, int]  # epoch of the owner's master, version


class _Follower(NamedTuple):
    state: State
    heard_ms: int


class _Deletion(NamedTuple):
    state: State  # of the owner, with the deletion
    due_ms: int  # until when its copies are waited for


NO_DELETION = _Deletion((0, 0), 0)


class MetaCopies:
    """One for each leadership. `reply` releases an answer when what it rests on is confirmed."""

    def __init__(self, broker: Broker, reply: Callable[[OnReply, bytes], None]) -> None:
        self._broker = broker
        self._reply = reply
        self._followers: dict[str, _Follower] = {}
        self._parked: dict[int, tuple[CopyMetaRequest, OnReply]] = {}
        # Replies, each with the newest deletion before it.  A later deletion does not delay them.
        self._waiting: deque[tuple[_Deletion, Callable[[], None]]] = deque()
        self._newest: _Deletion | None = None  # None: nothing was asked yet
        self._listing: tuple[State, Sequence[bytes]] = ((0, 0), ())  # the same for every follower

    # -- COPY_META

    def serve(self, body: bytes, on_reply: OnReply, number: int) -> None:
        request = CopyMetaRequest.FromString(body)
        broker, registry = self._broker, self._broker.registry
        if request.cluster != broker.settings.cluster.name or registry.owner:
            raise Refused(
                Code.PRECONDITION_FAILED,
                f"broker group {broker.settings.broker.name} of cluster "
                f"{broker.settings.cluster.name} owns no topics of {request.cluster[:100]}",
            )
        self._begin()
        for name in request.topics:
            with suppress(PopmqError):  # who asked is told that there is none
                broker.directory.topic(name, auto_create=True)
        for name in request.groups:
            with suppress(PopmqError):
                broker.directory.group(name)
        known = request.known_epoch, request.known_version
        if request.group:
            now_ms = broker.waits_ms()
            self._followers[request.group] = _Follower(known, now_ms)
            self._look()
        named = request.topics or request.groups
        if request.wait_ms and known == registry.meta_state and not named:
            self._park(request, on_reply, number)
        else:
            self._answer(request, on_reply)

    def cancel(self, number: int) -> bool:
        """The asker is gone; whether it was one of these."""
        return self._parked.pop(number, None) is not None

    def _park(self, request: CopyMetaRequest, on_reply: OnReply, number: int) -> None:
        self._parked[number] = request, on_reply
        wait_ms = min(request.wait_ms, LONGEST_WAIT_MS)
        self._later(self._broker.waits_ms() + wait_ms, partial(self._answer_parked, number))

    def _answer_parked(self, number: int) -> None:
        parked = self._parked.pop(number, None)
        if parked is not None:
            self._answer(*parked)

    def _answer(self, request: CopyMetaRequest, on_reply: OnReply) -> None:
        registry = self._broker.registry
        epoch, version = registry.meta_state
        reply = CopyMetaReply(epoch=epoch, version=version)
        # A broker group of a version without epochs does not name itself.
        known_epoch = request.known_epoch if request.group else epoch
        if (known_epoch, request.known_version) != (epoch, version):
            reply.records.extend(self._records(registry.meta_state))
        self._reply(on_reply, reply.SerializeToString())

    def _records(self, state: State) -> Sequence[bytes]:
        """All topics and groups, encoded once for each state: there may be 50,000."""
        if self._listing[0] != state:
            owned = self._broker.registry.owned_records()
            self._listing = state, [record.SerializeToString() for record in owned]
        return self._listing[1]

    # -- deletions, and creations behind them

    def answer_in_order(self, kind: Kind, body: bytes, on_reply: OnReply, reply: bytes) -> None:
        """Release the reply to a deletion or a creation that was appended."""
        if self._broker.registry.owner:  # dead letters, which each broker group has for itself
            self._reply(on_reply, reply)
            return
        self._begin()
        if kind in DELETIONS and not _is_local(kind, body):
            self._deleted()
            for number in list(self._parked):
                self._answer_parked(number)
        assert self._newest is not None, "_begin has set it"
        then = partial(self._wait, self._newest, partial(on_reply, reply))
        self._broker.when_confirmed(then)

    def _begin(self) -> None:
        """A former master may have answered nothing to a deletion, so the first creations wait."""
        if self._newest is None:
            self._newest = NO_DELETION
            if self._broker.registry.has_deleted:
                self._deleted()

    def _deleted(self) -> None:
        due_ms = self._broker.waits_ms() + COPIED_MS
        self._newest = _Deletion(self._broker.registry.meta_state, due_ms)
        self._later(due_ms, self._look)

    def _wait(self, deletion: _Deletion, then: Callable[[], None]) -> None:
        self._waiting.append((deletion, then))
        self._look()

    def _look(self) -> None:
        """Release the replies whose deletion is copied everywhere, or whose time is over."""
        while self._waiting and self._is_over(self._waiting[0][0]):
            _, then = self._waiting.popleft()
            then()

    def _is_over(self, deletion: _Deletion) -> bool:
        now_ms = self._broker.waits_ms()
        if now_ms >= deletion.due_ms:
            return True
        asking = {
            name for name, one in self._followers.items() if now_ms - one.heard_ms < FOLLOWS_MS
        }
        own = self._broker.settings.broker.name
        names = asking.union(self._broker.directory.cluster_groups) - {own}
        return all(self._has_copied(name, deletion) for name in names)

    def _has_copied(self, name: str, deletion: _Deletion) -> bool:
        follower = self._followers.get(name)
        return follower is not None and follower.state >= deletion.state

    def _later(self, at_ms: int, then: Callable[[], None]) -> None:
        self._broker.polling.retry_at(_PLACE, at_ms, then)


def _is_local(kind: Kind, body: bytes) -> bool:
    """Of a topic that each broker group has for itself."""
    return kind is Kind.DELETE_TOPIC and DeleteTopicRequest.FromString(body).name[:1] == "%"
