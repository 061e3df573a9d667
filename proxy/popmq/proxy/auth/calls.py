"""Calls as the gate hands them on: with the caller's name, with part of the reply, revocable."""

from collections.abc import Callable, Iterable, Sequence

from popmq.common.errors import PopmqError
from popmq.proxy.auth.policy import Need
from popmq.proxy.transport.interface import Call, ForwardedCall, GrpcStatus


class AuthorizedCall(ForwardedCall):
    """Of an admin method: the audit log writes who called, and which entry allowed it."""

    def __init__(
        self, call: Call, user: str, entry: str, shown: Callable[[bytes], bytes] | None = None
    ) -> None:
        super().__init__(call)
        self.user = user
        self.entry = entry
        self._shown = shown

    def send(self, message: bytes) -> None:
        self._call.send(message if self._shown is None else self._shown(message))


class RevocableCall(ForwardedCall):
    """A poll or a stream, which ends when its user loses the right to it.

    `needs` are what it was allowed for; the client of a stream may name others later.
    """

    def __init__(
        self,
        call: Call,
        needs: Iterable[Need],
        refusal: Callable[[PopmqError], Sequence[bytes]],
        on_over: Callable[["RevocableCall"], None],
    ) -> None:
        super().__init__(call)
        self.needs = set(needs)
        self.user = ""  # "": it began while auth.mode was off
        self.secret = b""  # that signed it
        self._refusal = refusal
        self._on_over = on_over
        self._gone: list[Callable[[], None]] = []
        self.over = False
        call.on_cancelled(self._cancelled)

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        if self.over:
            callback()
        else:
            self._gone.append(callback)

    def send(self, message: bytes) -> None:
        if not self.over:
            self._call.send(message)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        if not self.over:
            self._end()
            self._gone.clear()
            self._call.finish(status, detail)

    def revoke(self, error: PopmqError) -> None:
        """For its handler the client is gone; the client gets the refusal."""
        if self.over:
            return
        self._cancelled()
        for message in self._refusal(error):
            self._call.send(message)
        self._call.finish()

    def _cancelled(self) -> None:
        if self.over:
            return
        self._end()
        gone, self._gone = self._gone, []
        for callback in gone:
            callback()

    def _end(self) -> None:
        self.over = True
        self._on_over(self)
