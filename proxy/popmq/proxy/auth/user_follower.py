"""UserFollower: asks the owner of users for what changed, and changes them there.

The owner keeps the question back until there is something, so a change is here within
milliseconds.  An answer of an earlier state, as a deposed master may give, is passed over for a
while (as in brokers/metadata_cache.py).
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from google.protobuf.message import DecodeError

from popmq.common.clock import Clock
from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.wire.meta_pb2 import (
    ChangeUserReply,
    ChangeUserRequest,
    FollowUsersReply,
    FollowUsersRequest,
)
from popmq.proxy.auth.users import KnownUsers
from popmq.proxy.brokers.broker_ports import BrokerPorts

logger = logging.getLogger(__name__)

WAIT_MS = 5_000
TIMEOUT_MS = 8_000
AGAIN_S = 0.1
TOO_OLD_S = 5.0  # a broker of a version without users
OLDER_STATE_MS = 10_000
CHANGE_TIMEOUT_MS = 5_000
FOLLOWED_S = 1.0

OnChanged = Callable[[ChangeUserReply | PopmqError], None]


class _Waiting:
    """A change whose caller is answered when it is in force here, or when the time is over."""

    def __init__(self, state: tuple[int, int], then: Callable[[], None]) -> None:
        self.state = state
        self._then = then
        self.over = False
        self.timer: asyncio.TimerHandle | None = None

    def run(self) -> None:
        if not self.over:
            self.over = True
            if self.timer is not None:
                self.timer.cancel()
            self._then()


class UserFollower:
    """`on_answer` runs at each answer, and learns whether users or the mode changed."""

    def __init__(
        self,
        users: KnownUsers,
        brokers: BrokerPorts,
        clock: Clock,
        on_answer: Callable[[bool], None],
    ) -> None:
        self._users = users
        self._brokers = brokers
        self._clock = clock
        self._on_answer = on_answer
        self._cancel: Callable[[], None] = lambda: None
        self._again: asyncio.TimerHandle | None = None
        self._running = False
        self._generation = 0
        self._waiting: list[_Waiting] = []
        self.heard_ms: int | None = None  # time since boot at the last answer

    def start(self) -> None:
        """Follow until `stop`; must be called on the loop."""
        self._running = True
        self._ask()

    def stop(self) -> None:
        self._running = False
        self._generation += 1
        self._cancel()
        self._cancel = lambda: None
        if self._again is not None:
            self._again.cancel()
            self._again = None
        for item in self._waiting:
            item.run()
        self._waiting.clear()

    def change(self, change: ChangeUserRequest, then: OnChanged) -> None:
        """At the owner. `then` runs when the change is in force here, as far as that takes no
        longer than FOLLOWED_S; the answer may come before this returns."""

        def answered(answer: bytes | PopmqError) -> None:
            if isinstance(answer, PopmqError):
                then(answer)
                return
            try:
                reply = ChangeUserReply.FromString(answer)
            except DecodeError as error:
                then(Refused(Code.INTERNAL_ERROR, f"the owner of users answered: {error}"))
                return
            self.when_followed((reply.epoch, reply.version), partial(then, reply))

        try:
            port = self._owner()
        except PopmqError as error:
            then(error)
            return
        port.request(Kind.CHANGE_USER, change.SerializeToString(), CHANGE_TIMEOUT_MS, answered)

    def when_followed(self, state: tuple[int, int], then: Callable[[], None]) -> None:
        """Runs `then` when the owner's table is in force here as of `state` (epoch, version), and
        after FOLLOWED_S at the latest."""
        if self._users.state >= state or not self._running:
            then()
            return
        waiting = _Waiting(state, then)
        waiting.timer = asyncio.get_running_loop().call_later(FOLLOWED_S, waiting.run)
        self._waiting.append(waiting)

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            if self._users.state >= item.state:
                item.run()
            elif not item.over:
                self._waiting.append(item)

    def _owner(self) -> Port:
        owner = self._brokers.owner()
        if not owner:
            raise Unavailable("the owner of users is not known yet")
        return self._brokers.port(owner)

    def _ask(self) -> None:
        self._again = None
        if not self._running:
            return
        epoch, version = self._users.state
        wait_ms = WAIT_MS if self._users.mode is not None else 0
        request = FollowUsersRequest(known_epoch=epoch, known_version=version, wait_ms=wait_ms)
        self._generation += 1
        generation = self._generation

        def answered(answer: bytes | PopmqError) -> None:
            if generation == self._generation:
                self._cancel = lambda: None
                self._answered(answer)

        try:
            port = self._owner()
        except PopmqError:
            self._later(AGAIN_S)
            return
        number = port.request(Kind.FOLLOW_USERS, request.SerializeToString(), TIMEOUT_MS, answered)
        if generation == self._generation:
            self._cancel = lambda: port.cancel(number)

    def _answered(self, answer: bytes | PopmqError) -> None:
        if isinstance(answer, PopmqError):
            unknown = answer.code in (Code.UNSUPPORTED, Code.BAD_REQUEST)
            self._later(TOO_OLD_S if unknown else AGAIN_S)
            return
        try:
            self._apply(FollowUsersReply.FromString(answer))
        except (DecodeError, ValueError, PopmqError) as error:
            logger.error("the owner's users cannot be read", extra={"why": str(error)})
            self._later(TOO_OLD_S)
            return
        self._later(0)

    def _apply(self, reply: FollowUsersReply) -> None:
        now_ms = self._clock.boot_ms()
        older = (reply.epoch, reply.version) < self._users.state
        if older and self.heard_ms is not None and now_ms - self.heard_ms < OLDER_STATE_MS:
            self._later(AGAIN_S)
            return
        self.heard_ms = now_ms
        self._on_answer(self._users.apply(reply))
        self._release()

    def _later(self, after_s: float) -> None:
        if self._running and self._again is None:
            self._again = asyncio.get_running_loop().call_later(after_s, self._ask)
