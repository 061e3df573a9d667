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

from popmq.broker.deliveries.check_point_buffer import CheckPointBuffer
from popmq.broker.meta.metadata_resolver import MetadataResolver
from popmq.broker.meta.registry import Registry, owned_records
from popmq.broker.pop.long_polling import LongPolling
from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.settings.settings import Settings
from popmq.common.topics import META_TOPIC_ID
from popmq.common.wire.replication_pb2 import CopyMetaReply, CopyMetaRequest

COPIED_MS = 3_000
FOLLOWS_MS = 10_000  # a broker group that has not asked for so long counts if a controller lists it
LONGEST_WAIT_MS = 5_000

_PLACE = (META_TOPIC_ID, 0)  # where this module waits among the long polls
State = tuple[int, int]  # epoch of the owner's master, version
Answer = Callable[[bytes], None]
Reply = Callable[[Sequence[str]], None]  # gets the broker groups that have not copied a deletion


class _Follower(NamedTuple):
    state: State
    heard_ms: int


class _Deletion(NamedTuple):
    state: State  # of the owner, with the deletion
    due_ms: int  # until when its copies are waited for


NO_DELETION = _Deletion((0, 0), 0)


class MetaCopies:
    """One for each leadership. A reply leaves when what it rests on is confirmed."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        directory: MetadataResolver,
        polling: LongPolling,
        buffer: CheckPointBuffer,
        waits_ms: Callable[[], int],
    ) -> None:
        self._cluster, self._name = settings.cluster.name, settings.broker.name
        self._registry = registry
        self._metadata_resolver = directory
        self._polling = polling
        self._waits_ms = waits_ms
        self._when_acks_confirmed = buffer.when_acks_confirmed
        self._followers: dict[str, _Follower] = {}
        self._parked: dict[int, tuple[CopyMetaRequest, Answer]] = {}
        # Replies, each with the newest deletion before it.  A later deletion does not delay them.
        self._waiting: deque[tuple[_Deletion, Reply]] = deque()
        self._newest: _Deletion | None = None  # None: nothing was asked yet
        self._listing: tuple[State, Sequence[bytes]] = ((0, 0), ())  # the same for every follower

    # -- COPY_META

    def serve(self, request: CopyMetaRequest, answer: Answer, number: int) -> bool:
        """Answer now, or later; whether it waits, until then or until `cancel`."""
        registry = self._registry
        if request.cluster != self._cluster or registry.owner:
            raise Refused(
                Code.PRECONDITION_FAILED,
                f"broker group {self._name} of cluster {self._cluster} owns no topics of "
                f"{request.cluster[:100]}",
            )
        self._begin()
        for name in request.topics:
            with suppress(PopmqError):  # who asked is told that there is none
                self._metadata_resolver.topic(name, auto_create=True)
        for name in request.groups:
            with suppress(PopmqError):
                self._metadata_resolver.group(name, fifo=name in request.fifo_groups)
        known = request.known_epoch, request.known_version
        if request.group:
            now_ms = self._waits_ms()
            self._followers[request.group] = _Follower(known, now_ms)
            self._look()
        named = request.topics or request.groups
        if request.wait_ms and known == registry.meta_state and not named:
            self._park(request, answer, number)
            return True
        self._answer(request, answer)
        return False

    def cancel(self, number: int) -> None:
        """Its client is gone."""
        self._parked.pop(number, None)

    def _park(self, request: CopyMetaRequest, answer: Answer, number: int) -> None:
        self._parked[number] = request, answer
        wait_ms = min(request.wait_ms, LONGEST_WAIT_MS)
        self._later(self._waits_ms() + wait_ms, partial(self._answer_parked, number))

    def _answer_parked(self, number: int) -> None:
        parked = self._parked.pop(number, None)
        if parked is not None:
            self._answer(*parked)

    def _answer(self, request: CopyMetaRequest, answer: Answer) -> None:
        registry = self._registry
        epoch, version = registry.meta_state
        reply = CopyMetaReply(epoch=epoch, version=version)
        # A broker group of a version without epochs does not name itself.
        known_epoch = request.known_epoch if request.group else epoch
        if (known_epoch, request.known_version) != (epoch, version):
            reply.records.extend(self._records(registry.meta_state))
        self._when_acks_confirmed(partial(answer, reply.SerializeToString()))

    def _records(self, state: State) -> Sequence[bytes]:
        """All topics and groups, encoded once for each state: there may be 50,000."""
        if self._listing[0] != state:
            owned = owned_records(self._registry)
            self._listing = state, [record.SerializeToString() for record in owned]
        return self._listing[1]

    # -- deletions, and creations behind them

    def answer_in_order(self, reply: Reply, *, deletion: bool) -> None:
        """Release the reply to a deletion or a creation that was appended."""
        if self._registry.owner:  # dead letters, which each broker group has for itself
            self._when_acks_confirmed(partial(reply, ()))
            return
        self._begin()
        if deletion:
            self._deleted()
            for number in list(self._parked):
                self._answer_parked(number)
        assert self._newest is not None, "_begin has set it"
        self._when_acks_confirmed(partial(self._wait, self._newest, reply))

    def _begin(self) -> None:
        """A former master may have answered nothing to a deletion, so the first creations wait."""
        if self._newest is None:
            self._newest = NO_DELETION
            if self._registry.has_deleted:
                self._deleted()

    def _deleted(self) -> None:
        due_ms = self._waits_ms() + COPIED_MS
        self._newest = _Deletion(self._registry.meta_state, due_ms)
        self._later(due_ms, self._look)

    def _wait(self, deletion: _Deletion, then: Reply) -> None:
        self._waiting.append((deletion, then))
        self._look()

    def _look(self) -> None:
        """Release the replies whose deletion is copied everywhere, or whose time is over."""
        while self._waiting:
            deletion, then = self._waiting[0]
            missing = self._not_copied(deletion)
            if missing and self._waits_ms() < deletion.due_ms:
                return
            self._waiting.popleft()
            then(missing)

    def _not_copied(self, deletion: _Deletion) -> Sequence[str]:
        now_ms = self._waits_ms()
        asking = {
            name
            for name, follower in self._followers.items()
            if now_ms - follower.heard_ms < FOLLOWS_MS
        }
        own = self._name
        names = asking.union(self._metadata_resolver.cluster_groups) - {own}
        return sorted(name for name in names if not self._has_copied(name, deletion))

    def _has_copied(self, name: str, deletion: _Deletion) -> bool:
        follower = self._followers.get(name)
        return follower is not None and follower.state >= deletion.state

    def _later(self, at_ms: int, then: Callable[[], None]) -> None:
        self._polling.retry_at(_PLACE, at_ms, then)
