"""Identity: from a call's headers to a user, or a refusal with its reason.

A header that was verified is not verified again while its user is unchanged and its date is fresh;
the cache is bounded and never holds a failure.
"""

import hmac
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from popmq.common.address import host_of, is_loopback
from popmq.common.clock import Clock
from popmq.common.errors import Code, PopmqError
from popmq.common.unix_socket import USER_PREFIX
from popmq.common.users import AuthMode, format_clock_offset
from popmq.proxy.auth.clock_offsets import Fresh, judge, zones_that_step_back
from popmq.proxy.auth.failure_waits import FailureWaits
from popmq.proxy.auth.remoting_rights import (
    ACCESS_KEY,
    RemotingRequest,
    signature_bytes,
    signed_contents,
)
from popmq.proxy.auth.signature import (
    Stamp,
    parse_authorization,
    parse_stamp,
    signature_of,
)
from popmq.proxy.auth.users import KnownUser, KnownUsers
from popmq.proxy.transport.interface import Call

VERIFIED_KEPT = 8_192
_DUMMY_SECRET = b"no user has this secret, and the time of a comparison tells nothing"
_NOT_ACCEPTED = "the access key is unknown, or the signature is not of its secret"


class AccessRefused(PopmqError):
    """`reason` is the label of the metric; `user` is the one that was verified, or claimed."""

    def __init__(
        self, code: Code, reason: str, message: str, *, user: str = "", entry: str = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.user = user
        self.entry = entry


def unauthorized(reason: str, message: str, user: str = "") -> AccessRefused:
    return AccessRefused(Code.UNAUTHORIZED, reason, message, user=user)


class _Verified(NamedTuple):
    user: KnownUser
    until_ms: int
    secret: bytes


class Identity:
    def __init__(self, users: KnownUsers, clock: Clock, skew_ms: int, waits: FailureWaits) -> None:
        self._users = users
        self._clock = clock
        self._skew_ms = skew_ms
        self._waits = waits
        self._verified: dict[tuple[str, str], _Verified] = {}
        self.checks = 0  # signatures that were calculated

    def identify(self, call: Call) -> KnownUser:
        """The caller. Raises AccessRefused with UNAUTHORIZED or FORBIDDEN."""
        metadata = call.metadata
        key = metadata.get("authorization", ""), metadata.get("x-mq-date-time", "")
        peer = call.peer
        if not call.encrypted and not is_local(peer):
            self._refuse_plain_text(key[0])
        known = self._verified.get(key)
        now_ms = self._clock.wall_ms()
        if known is not None and known.user.is_current and now_ms <= known.until_ms:
            user = known.user
        else:
            user = self._verify(key, now_ms, host_of(peer))
        if user.config.networks:
            self.check_network(user, peer)
        return user

    def secret_of(self, call: Call) -> bytes:
        """That signed a call whose caller was identified just now."""
        metadata = call.metadata
        key = metadata.get("authorization", ""), metadata.get("x-mq-date-time", "")
        known = self._verified.get(key)
        return known.secret if known is not None else b""

    def identify_remoting(self, request: RemotingRequest, call: Call) -> tuple[KnownUser, bytes]:
        """The sender of a Remoting request, and the secret that signed it. Raises as `identify`.

        No date is signed here, so a request that was read on its way can be sent again as it is.
        """
        access_key = request.text(ACCESS_KEY)
        if not access_key:
            raise unauthorized(
                "anonymous", "this cluster has users: the request has no AccessKey and Signature"
            )
        if not call.encrypted and not is_local(call.peer):
            raise self._plain_text(access_key)
        signature, contents = signature_bytes(request), signed_contents(request)
        user, secret = self._check_from(host_of(call.peer), access_key, signature, *contents)
        if user.config.networks:
            self.check_network(user, call.peer)
        return user, secret

    def check_network(self, user: KnownUser, peer: str) -> None:
        host = host_of(peer)
        if not user.may_call_from(host):
            raise AccessRefused(
                Code.FORBIDDEN,
                "network",
                f"user {user.name} may not call from {host or 'an unknown address'}",
                user=user.name,
            )

    def _check_from(
        self, host: str, access_key: str, signature: bytes, *contents: bytes
    ) -> tuple[KnownUser, bytes]:
        """As `check_signature`, of one of the contents, unless the source of the call waits."""
        self._check_wait(host, access_key)
        for left in reversed(range(len(contents))):
            try:
                verified = self.check_signature(access_key, signature, contents[-1 - left])
            except AccessRefused as refused:
                if left:
                    continue
                if refused.reason != "disabled":
                    self._waits.failed(host, access_key, self._clock.boot_ms())
                raise
            self._waits.succeeded(host, access_key, self._clock.boot_ms())
            return verified
        raise AssertionError("something is signed")

    def _check_wait(self, host: str, access_key: str) -> None:
        if self._users.mode is not AuthMode.ON:
            return  # `observe` refuses nothing, and shows why each call would be refused
        try:
            self._waits.check(host, access_key, self._clock.boot_ms())
        except PopmqError as error:
            raise AccessRefused(error.code, "waits", str(error), user=access_key[:64]) from error

    def check_signature(
        self, access_key: str, signature: bytes, signed: bytes
    ) -> tuple[KnownUser, bytes]:
        """The user whose secret signed that, and the secret. The time does not tell whether there
        is such a user."""
        now_ms = self._clock.wall_ms()
        user = self._users.find(access_key)
        secrets = valid_secrets(user, now_ms) if user is not None else ()
        self.checks += 1
        matches = [
            hmac.compare_digest(signature, signature_of(secret, signed))
            for secret in (*secrets, _DUMMY_SECRET)
        ]
        if user is None:
            raise unauthorized("unknown", _NOT_ACCEPTED, access_key[:64])
        if not any(matches[:-1]):
            raise unauthorized("signature", _NOT_ACCEPTED, access_key[:64])
        if user.config.disabled:
            raise unauthorized("disabled", f"user {user.name} is disabled", user.name)
        return user, secrets[matches.index(True)]

    def _verify(self, key: tuple[str, str], now_ms: int, host: str) -> KnownUser:
        header, date = key
        try:
            credentials = parse_authorization(header)
            if credentials.is_anonymous:
                raise unauthorized(
                    "anonymous", "this cluster has users: the call has no access key and signature"
                )
            stamp = parse_stamp(date)
        except AccessRefused:
            raise
        except PopmqError as error:
            self._check_wait(host, "")
            self._waits.failed(host, "", self._clock.boot_ms())
            raise unauthorized("malformed", str(error)) from error
        user, secret = self._check_from(
            host, credentials.access_key, credentials.signature, date.encode()
        )
        fresh = self._fresh(user, stamp, now_ms)
        if fresh.learned is not None:
            user.shown_clock = fresh  # recorded when a call succeeds: a refused one changes nothing
        until_ms = min([fresh.until_ms, *(end for _, end in user.secrets if end > now_ms)])
        if len(self._verified) >= VERIFIED_KEPT:
            self._verified.clear()
        self._verified[key] = _Verified(user, until_ms, secret)
        return user

    def _fresh(self, user: KnownUser, stamp: Stamp, now_ms: int) -> Fresh:
        ahead_ms = stamp.ms - now_ms
        if stamp.is_utc:
            if abs(ahead_ms) <= self._skew_ms:
                return Fresh(stamp.ms + self._skew_ms)
            raise self._stale(user, ahead_ms)
        fresh = judge(
            ahead_ms,
            user.offsets,
            learns=user.learns_clock,
            now_ms=now_ms,
            skew_ms=self._skew_ms,
            steps_back=zones_that_step_back,
        )
        if fresh is None:
            raise self._stale(user, ahead_ms)
        return fresh

    def _stale(self, user: KnownUser, ahead_ms: int) -> AccessRefused:
        nearest = round(ahead_ms / 900_000) * 15
        shown = ", ".join(map(format_clock_offset, user.offsets)) or "none yet"
        hint = ""
        if -12 * 60 <= nearest <= 14 * 60 and nearest not in user.offsets:
            offset = format_clock_offset(nearest)
            hint = (
                "; if the client's clock shows local time: "
                f"popmq user clock {user.name} --add {offset}"
            )
        where = "ahead of" if ahead_ms > 0 else "behind"
        return unauthorized(
            "clock",
            f"the signed date is {abs(ahead_ms) // 1_000} s {where} "
            f"this server's clock, and user {user.name} has the clock offsets {shown} "
            f"with {self._skew_ms // 1_000} s each way (auth.skew_ms){hint}",
            user.name,
        )

    def _refuse_plain_text(self, header: str) -> None:
        """Refuse credentials that came in plain text from another machine, without reading them."""
        try:
            claimed = parse_authorization(header)
        except PopmqError:
            claimed = None
        if claimed is not None and claimed.is_anonymous:
            return
        raise self._plain_text(claimed.access_key if claimed is not None else "")

    def _plain_text(self, access_key: str) -> AccessRefused:
        return unauthorized(
            "plain_text",
            "credentials came in plain text over the network: connect over TLS, and give the user "
            "another secret",
            access_key[:64],
        )


def valid_secrets(user: KnownUser, now_ms: int) -> Sequence[bytes]:
    return [secret for secret, until_ms in user.secrets if not until_ms or now_ms < until_ms]


@lru_cache(maxsize=8_192)
def is_local(peer: str) -> bool:
    """Whether the caller is on this machine: so is one on a unix socket."""
    if not peer or peer.startswith(USER_PREFIX):
        return True
    return is_loopback(host_of(peer).strip("[]"))
