"""UserFollows: the owner's answers to FOLLOW_USERS, kept back until users or the mode change.

A reply leaves when what it rests on is confirmed, so no proxy enforces a change that a crash of
the master could undo.
"""

from collections.abc import Callable
from functools import partial

from popmq.broker.deliveries.check_point_buffer import CheckPointBuffer
from popmq.broker.meta.registry import Registry
from popmq.broker.pop.long_polling import LongPolling
from popmq.broker.store.message_store import MessageStore
from popmq.common.protocol.user_records import user_record
from popmq.common.topics import OFFSETS_TOPIC_ID
from popmq.common.wire.meta_pb2 import FollowUsersReply, FollowUsersRequest

LONGEST_WAIT_MS = 5_000

# Where this module waits among the long polls; (META_TOPIC_ID, 0) is that of MetaCopies.
_PLACE = (OFFSETS_TOPIC_ID, 0)
Answer = Callable[[bytes], None]


class UserFollows:
    """One for each leadership."""

    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        polling: LongPolling,
        buffer: CheckPointBuffer,
        waits_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._registry = registry
        self._polling = polling
        self._when_acks_confirmed = buffer.when_acks_confirmed
        self._waits_ms = waits_ms
        self._parked: dict[int, tuple[FollowUsersRequest, Answer]] = {}

    def serve(self, request: FollowUsersRequest, answer: Answer, number: int) -> bool:
        """Answer now, or later; whether it waits, until then or until `cancel`."""
        self._registry.check_owns_users()
        known = request.known_epoch, request.known_version
        if not request.wait_ms or known != self._state:
            self._answer(request, answer)
            return False
        self._parked[number] = request, answer
        at_ms = self._waits_ms() + min(request.wait_ms, LONGEST_WAIT_MS)
        self._polling.retry_at(_PLACE, at_ms, partial(self._answer_parked, number))
        return True

    def cancel(self, number: int) -> None:
        """Its proxy is gone."""
        self._parked.pop(number, None)

    def changed(self) -> None:
        """A change was appended: every proxy gets it as soon as it is confirmed."""
        for number in list(self._parked):
            self._answer_parked(number)

    @property
    def _state(self) -> tuple[int, int]:
        return self._store.epoch, self._registry.users.changes

    def _answer_parked(self, number: int) -> None:
        parked = self._parked.pop(number, None)
        if parked is not None:
            self._answer(*parked)

    def _answer(self, request: FollowUsersRequest, answer: Answer) -> None:
        users = self._registry.users
        epoch, version = self._state
        reply = FollowUsersReply(epoch=epoch, version=version, mode=users.mode.value)
        same_epoch = request.known_epoch == epoch and request.known_version <= version
        deleted = users.deleted_since(request.known_version) if same_epoch else None
        reply.whole = deleted is None
        changed = users if deleted is None else users.changed_since(request.known_version)
        reply.users.extend(map(user_record, changed))
        reply.deleted.extend(deleted or ())
        self._when_acks_confirmed(partial(answer, reply.SerializeToString()))
