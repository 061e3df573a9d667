"""Requests that take more than a moment: done in steps between the loop's other work.

A job reads with `wait` off.  What is not in memory is read by a thread that may wait, and the
step is taken again; so a step that raises ColdRead must have changed nothing that counts.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from popmq.broker.operations.resumable_reads import Unconfirmed
from popmq.broker.store.message_store import MessageStore
from popmq.common.disk import ColdRead
from popmq.common.errors import Code, PopmqError, Refused, TooManyRequests
from popmq.common.protocol.messaging_payloads import OnReply

logger = logging.getLogger(__name__)

JOB_LIMIT = 256


class Job(Protocol):
    def step(self) -> bytes | None:
        """Do a bounded piece of work; the encoded reply once it is done.

        Raises ColdRead or Unconfirmed to be called again when the bytes are there, and
        PopmqError to refuse.
        """
        ...


class RequestRunner:
    def __init__(self, store: MessageStore, before: Callable[[], None] = lambda: None) -> None:
        """`before` is called before each step."""
        self._store = store
        self._before = before
        self.running = 0

    def run(self, job: Job, on_reply: OnReply) -> None:
        """Take the first step now and the others later; the reply leaves when what it rests on
        is confirmed (D2)."""
        if self.running >= JOB_LIMIT:
            raise TooManyRequests(f"{JOB_LIMIT} requests of this kind are being served: try again")
        self.running += 1
        self._turn(job, on_reply)

    def _turn(self, job: Job, on_reply: OnReply) -> None:
        try:
            self._before()
            reply = job.step()
        except Unconfirmed:
            self._store.when_confirmed(lambda: self._turn(job, on_reply))
        except ColdRead as cold:
            self._warm(cold, job, on_reply)
        except PopmqError as refusal:
            self._end(on_reply, refusal)
        except BaseException:  # a broken invariant, or the end: whoever runs the loop decides
            self.running -= 1
            raise
        else:
            if reply is None:
                self._store.call_soon(lambda: self._turn(job, on_reply))
            else:
                self._store.when_confirmed(lambda: self._end(on_reply, reply))

    def _end(self, on_reply: OnReply, answer: bytes | PopmqError) -> None:
        self.running -= 1
        on_reply(answer)

    def _warm(self, cold: ColdRead, job: Job, on_reply: OnReply) -> None:
        def read() -> None:
            cold.warm()

        def done(error: BaseException | None) -> None:
            if error is None:
                self._turn(job, on_reply)
                return
            logger.error("cannot read from the disk", extra={"reason": str(error)})
            refusal = Refused(Code.INTERNAL_ERROR, f"old messages cannot be read: {error}")
            self._end(on_reply, refusal)

        self._store.readers.submit(read, done)
