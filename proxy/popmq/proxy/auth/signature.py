"""The headers `authorization` and `x-mq-date-time`: their forms, and how official clients sign.

They sign the date alone: HMAC-SHA1 with the user's secret, as upper- or lower-case hex.  Parts come
in any order.  A date is `yyyyMMddTHHmmssZ`, where some clients write their local time, or RFC 3339.
"""

import hmac
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.signing import ALGORITHM

HEADER_LIMIT = 2_048
_COMPACT = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z", re.ASCII)
_RFC_3339 = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.\d{1,9})?"
    r"(?:([Zz])|([+-])(\d\d):(\d\d))",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Stamp:
    """A signed date as milliseconds since 1970. `is_utc` if its text says so beyond doubt: a Z
    may stand behind local time."""

    ms: int
    is_utc: bool


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a header claims; nothing of it is verified."""

    access_key: str
    signature: bytes

    @property
    def is_anonymous(self) -> bool:
        return not self.access_key


ANONYMOUS = Credentials("", b"")


def parse_authorization(header: str) -> Credentials:
    """ANONYMOUS without a header or with an empty Credential. Raises UNAUTHORIZED."""
    header = header.strip()
    if not header:
        return ANONYMOUS
    if len(header) > HEADER_LIMIT:
        raise malformed(f"it has {len(header)} characters, and the limit is {HEADER_LIMIT}")
    algorithm, _, rest = header.partition(" ")
    if algorithm != ALGORITHM:
        # Not what it begins with: that may be a secret, and refusals are logged.
        raise malformed(f"it does not begin with {ALGORITHM} and a blank")
    parts: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or name in parts:
            raise malformed("its parts are NAME=VALUE, each once, with commas between them")
        parts[name] = value.strip()
    access_key = parts.get("Credential", "").partition("/")[0]
    if not access_key:
        return ANONYMOUS
    try:
        signature = bytes.fromhex(parts.get("Signature", ""))
    except ValueError:
        raise malformed("its Signature is no hex text") from None
    if (signed := parts.get("SignedHeaders", "")) and signed.lower() != "x-mq-date-time":
        raise malformed("its SignedHeaders are not x-mq-date-time")
    return Credentials(access_key, signature)


def malformed(why: str) -> PopmqError:
    return Refused(Code.UNAUTHORIZED, f"the authorization header cannot be read: {why}")


def parse_stamp(text: str) -> Stamp:
    """Raises UNAUTHORIZED for what is no date of either form."""
    zone = UTC
    is_utc = False
    if (matched := _COMPACT.fullmatch(text)) is None:
        matched = _RFC_3339.fullmatch(text)
        if matched is None:
            raise _no_date(text)
        if matched[8]:
            shift = timedelta(hours=int(matched[9]), minutes=int(matched[10]))
            if shift >= timedelta(days=1):
                raise _no_date(text)
            zone, is_utc = timezone(-shift if matched[8] == "-" else shift), True
    try:
        year, month, day, hour, minute, second = map(int, matched.groups()[:6])
        moment = datetime(year, month, day, hour, minute, second, tzinfo=zone)
        return Stamp(int(moment.timestamp()) * 1_000, is_utc)
    except (ValueError, OverflowError):
        raise _no_date(text) from None


def _no_date(text: str) -> PopmqError:
    return Refused(
        Code.UNAUTHORIZED,
        f"the header x-mq-date-time, {text[:40]!r}, is no date such as 20260131T235959Z",
    )


def signature_of(secret: bytes, text: bytes) -> bytes:
    return hmac.digest(secret, text, "sha1")
