"""Request: what a broker is asked, if it is not a PUT, POP or ACK; those are served directly."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from popmq.broker.core.broker import Broker
from popmq.broker.operations.resumable_reads import ResumableRead
from popmq.broker.store.message_store import MessageStore
from popmq.common.errors import PopmqError, TooManyRequests, Unavailable
from popmq.common.protocol.messaging_payloads import Kind, OnReply

# By the number of the request that waits: how its wait ends when its client has left.
WaitingRequests = dict[int, Callable[[], object]]


@dataclass(slots=True, eq=False)
class Request:
    kind: Kind
    body: bytes
    number: int
    on_reply: OnReply
    waiting: WaitingRequests

    def wait(self, cancel: Callable[[], object]) -> None:
        """It waits from now on; `cancel` is called if its client leaves meanwhile."""
        self.waiting[self.number] = cancel

    @property
    def waits(self) -> bool:
        return self.number in self.waiting

    def stop_waiting(self) -> bool:
        """Whether it waited until now: not when it was answered, or its client left."""
        return self.waiting.pop(self.number, None) is not None

    def answer(self, reply: bytes | PopmqError) -> None:
        """Its wait is over."""
        self.waiting.pop(self.number, None)
        self.on_reply(reply)


def refuse(error: PopmqError, on_reply: OnReply, store: MessageStore) -> None:
    """It rests on what was read, which may not be confirmed yet either (rule 8): a topic that
    exists already may be gone with this master. That there is no room is said at once."""
    if isinstance(error, (TooManyRequests, Unavailable)):
        on_reply(error)
    else:
        store.when_log_confirmed(partial(on_reply, error))


class MemoryReplies(Protocol):
    """When replies leave that rest on the memory of several brokers (ha/memory_confirmation.py);
    of a broker without replicas, at once."""

    def when_in_memory(self, then: Callable[[], None]) -> None:
        """Run `then` once all of the SyncStateSet hold what was appended."""
        ...

    def when_leadership_confirmed(self, then: Callable[[], None]) -> None:
        """Run `then` once all of them spoke, as only slaves of this epoch do."""
        ...


class NoReplicas:
    def when_in_memory(self, then: Callable[[], None]) -> None:
        then()

    def when_leadership_confirmed(self, then: Callable[[], None]) -> None:
        then()


# Returns the encoded reply, which leaves when everything it rests on is confirmed; or the steps
# that make it; or None when the handler itself answers, now or later.  Raises a PopmqError, or a
# DecodeError when the body is none of this kind.
Handler = Callable[[Broker, Request], bytes | ResumableRead[bytes] | None]
