"""RequestRunner: requests that take more than a moment, done in steps between the loop's other
work (operations/resumable_reads.py)."""

from collections.abc import Callable
from functools import partial

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.request import Handler, Request, refuse
from popmq.broker.log.cold_read_retry import ColdReadRetry
from popmq.broker.operations.resumable_reads import ResumableRead
from popmq.broker.store.message_store import MessageStore
from popmq.common.disk import ColdRead
from popmq.common.errors import PopmqError, TooManyRequests
from popmq.common.protocol.messaging_payloads import OnReply

REQUEST_LIMIT = 256

Steps = ResumableRead[bytes]


class RequestRunner:
    def __init__(self, store: MessageStore, before: Callable[[], None] = lambda: None) -> None:
        """`before` is called before each handler and each step: what a broker has to write before
        anything is read (`CheckPointBuffer.flush_acks`)."""
        self._store = store
        self._before = before
        self._cold = ColdReadRetry(store.readers)
        self.running = 0

    def call(self, handler: Handler, broker: Broker, request: Request) -> bytes | None:
        """The handler's reply; None when it comes later."""
        self._before()
        reply = handler(broker, request)
        if reply is None or isinstance(reply, bytes):
            return reply
        self.run(reply, request.on_reply)
        return None

    def run(self, steps: Steps, on_reply: OnReply) -> None:
        """Take the first step now and the others later; the reply leaves when what it rests on
        is confirmed (D2)."""
        if self.running >= REQUEST_LIMIT:
            raise TooManyRequests(
                f"{REQUEST_LIMIT} requests of this kind are being served: try again"
            )
        self.running += 1
        self._turn(steps, on_reply)

    def _turn(self, steps: Steps, on_reply: OnReply) -> None:
        try:
            self._before()
            missing = next(steps)
        except StopIteration as end:
            reply: bytes = end.value
            self._store.when_log_confirmed(lambda: self._end(on_reply, reply))
            return
        except PopmqError as refusal:
            refuse(refusal, partial(self._end, on_reply), self._store)
            return
        except BaseException:  # a broken invariant, or the end: whoever runs the loop decides
            self.running -= 1
            raise

        def again() -> None:
            self._turn(steps, on_reply)

        if missing is None:
            self._store.call_soon(again)
        elif isinstance(missing, ColdRead):
            self._cold.retry(missing, again, lambda refusal: self._end(on_reply, refusal))
        else:
            self._store.when_log_confirmed(again)

    def _end(self, on_reply: OnReply, answer: bytes | PopmqError) -> None:
        self.running -= 1
        on_reply(answer)
