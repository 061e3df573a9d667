"""MasterHandOver: a master that lets another take over, at a moment when nothing is lost by it.

Clients are not admitted meanwhile, so it has an end: either another epoch comes, or this broker
goes on as before (docs/concepts/replication.md).
"""

from popmq.broker.ha.slave_progress import SlaveProgress
from popmq.broker.store.message_store import MessageStore
from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import OnReply
from popmq.common.wire.controller_pb2 import HandOverReply


class MasterHandOver:
    """`to` takes over; who asked is answered once, when it could."""

    def __init__(
        self, store: MessageStore, to: SlaveProgress, *, until_ms: int, on_reply: OnReply
    ) -> None:
        self._store = store
        self._to = to
        self._until_ms = until_ms
        self._on_reply: OnReply | None = on_reply

    def step(self, now_ms: int) -> bool:
        """Look whether the other one has everything; True when clients are to be let in again."""
        end = self._store.end
        if self._on_reply is not None and self._to.acked >= end == self._store.confirmed:
            self._answer(HandOverReply(end=end).SerializeToString())
        if now_ms < self._until_ms:
            return False
        self.give_up(f"node {self._to.node} has {self._to.acked} of {end} bytes of log")
        return True

    def give_up(self, why: str) -> None:
        """Nothing came of it."""
        if self._on_reply is not None:
            self._answer(Refused(Code.PRECONDITION_FAILED, f"not handed over: {why}"))

    def _answer(self, answer: bytes | PopmqError) -> None:
        on_reply, self._on_reply = self._on_reply, None
        assert on_reply is not None
        on_reply(answer)
