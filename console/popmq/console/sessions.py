"""Sessions: who is logged in to the console, in memory alone (docs/console.md).

A session is a random token, which a cookie of the browser holds.  It stands for a user of the
cluster, and all that its pages ask is signed by that user's secret: so proxies decide what a page
shows, and nothing that was answered to a user is shown to another.  Sessions of the same user share
one Console.
"""

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from popmq.cli.client import CallRefused
from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.failure_waits import FailureWaits
from popmq.common.signing import Signer
from popmq.console.history import EVERY_S
from popmq.console.page import Console

IDLE_S = 3_600.0
LONGEST_S = 12 * 3_600.0
MAX_SESSIONS = 1_000


@dataclass(slots=True)
class Session:
    signer: Signer
    console: Console
    ends_s: float
    used_s: float


class Sessions:
    """`open_console` makes the Console of a user. `always`: nothing is shown without a login."""

    def __init__(
        self,
        open_console: Callable[[Signer], Console],
        *,
        always: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_console = open_console
        self.always = always
        self._now_s = now_s
        self.anonymous = open_console(Signer())
        self.refused = False  # whether the proxy refused what was asked without a login
        self._sessions: dict[str, Session] = {}
        self._waits = FailureWaits()
        self._lock = threading.Lock()

    def find(self, token: str) -> Session | None:
        """The session, which is used by that; None for one that is over."""
        now_s = self._now_s()
        with self._lock:
            session = self._sessions.get(token)
            if session is None:
                return None
            if now_s < session.ends_s and now_s - session.used_s < IDLE_S:
                session.used_s = now_s
                return session
        self.log_out(token)
        return None

    def log_in(self, signer: Signer, address: str) -> str:
        """The token of a new session.  Raises CallRefused or Refused for a user that the proxy does
        not know, and CallFailed when it does not answer."""
        now_ms = int(self._now_s() * 1_000)
        if left_ms := self._waits.left_ms(address, now_ms):
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"logins from {address} failed: the next one is possible in "
                f"{max(1, round(left_ms / 1_000))} s",
            )
        self._check_users_are_on()
        console = self._console_of(signer)
        try:
            console.client.calls.check_signature()
        except CallRefused:
            self._waits.failed(address, now_ms)
            self._close_unused(console)
            raise
        self._waits.succeeded(address)
        return self._begin(signer, console)

    def log_out(self, token: str) -> None:
        with self._lock:
            session = self._sessions.pop(token, None)
        if session is not None:
            self._close_unused(session.console)

    def consoles(self) -> list[Console]:
        """One for each user that is logged in."""
        with self._lock:
            return list({id(s.console): s.console for s in self._sessions.values()}.values())

    def watched(self) -> list[Console]:
        """Those whose plots go on; without a login only where nobody needs it."""
        return [*([] if self.always or self.refused else [self.anonymous]), *self.consoles()]

    def prune(self) -> None:
        """End the sessions whose time is over."""
        with self._lock:
            tokens = list(self._sessions)
            now_s = self._now_s()
            over = [
                token
                for token in tokens
                if now_s >= self._sessions[token].ends_s
                or now_s - self._sessions[token].used_s >= IDLE_S
            ]
        for token in over:
            self.log_out(token)

    def close(self) -> None:
        for console in (self.anonymous, *self.consoles()):
            console.client.close()

    def _check_users_are_on(self) -> None:
        """A proxy that checks nobody would accept every secret."""
        try:
            self.anonymous.client.calls.check_signature()
        except CallRefused:
            return
        raise Refused(
            Code.PRECONDITION_FAILED,
            "the cluster has no users to log in as: auth.mode is not on (popmq auth mode on)",
        )

    def _console_of(self, signer: Signer) -> Console:
        with self._lock:
            known = (s.console for s in self._sessions.values() if s.signer == signer)
            console = next(known, None)
        return self._open_console(signer) if console is None else console

    def _begin(self, signer: Signer, console: Console) -> str:
        token, now_s = secrets.token_urlsafe(32), self._now_s()
        with self._lock:
            self._sessions[token] = Session(signer, console, now_s + LONGEST_S, now_s)
            unused = [
                self._sessions.pop(next(iter(self._sessions))).console
                for _ in range(len(self._sessions) - MAX_SESSIONS)
            ]
        for older in unused:
            self._close_unused(older)
        return token

    def _close_unused(self, console: Console) -> None:
        """Connections and secret go; a redrive that still runs opens a connection of its own."""
        if all(other is not console for other in self.consoles()):
            console.client.close()


def keep(sessions: Sessions, ended: threading.Event) -> None:
    """Run by a thread until `ended`: what waits, as each user sees it, for the plots."""
    while True:
        sessions.prune()
        for console in sessions.watched():
            with suppress(PopmqError):  # a gap; the pages say why
                console.client.history.add(console.client.overview())
        if ended.wait(EVERY_S):
            return
