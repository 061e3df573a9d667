"""What arguments may be: durations, times, counts, names; each refuses the rest in words."""

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from popmq.common.errors import PopmqError
from popmq.common.quantities import DAY_MS, parse_duration_ms, parse_size

# The numbers of the protocol end somewhere; so do the commands', where people can read it.
MAX_DURATION_DAYS = 36_500
MAX_COUNT = (1 << 31) - 1
MAX_OFFSET = (1 << 63) - 1
# Fewer digits are a date, as in 20300131.
EPOCH_MS_DIGITS = range(11, 16)
OLDEST, NEWEST = ("oldest", "earliest"), ("newest", "latest")
EARLIEST_MS = 1  # in requests 0 is no time at all
LATEST_DUE_MS = 253_402_300_799_999  # the end of the year 9999
_AGO = re.compile(r"(.+) ago")
_NOT_NEGATIVE = re.compile(r"-\d")


def duration_argument(text: str) -> int:
    """Milliseconds."""
    if _NOT_NEGATIVE.match(text):
        raise click.BadParameter(f"{shortened(text)!r} is negative: a duration is 0 or more")
    try:
        # Python refuses to read numbers of thousands of digits.
        milliseconds = parse_duration_ms(text) if len(text) < 100 else DAY_MS * DAY_MS
    except PopmqError as error:
        raise click.BadParameter(str(error)) from error
    if milliseconds > MAX_DURATION_DAYS * DAY_MS:
        raise click.BadParameter(f"{shortened(text)!r} is over the limit of {MAX_DURATION_DAYS}d")
    return milliseconds


def positive_duration_argument(text: str) -> int:
    """Milliseconds, at least one."""
    milliseconds = duration_argument(text)
    if milliseconds < 1:
        raise click.BadParameter(f"{shortened(text)!r} is no time at all: at least 1ms")
    return milliseconds


def time_argument(text: str) -> int:
    """Milliseconds since 1970 of an ISO 8601 time, or written as such, or of `90m ago`; a time
    without a zone is this machine's.  No message is stored after `now`, the latest time."""
    if text in ("now", *NEWEST):
        return round(time.time() * 1000)
    if text in OLDEST:
        return EARLIEST_MS
    if text.isascii() and text.isdecimal() and len(text) in EPOCH_MS_DIGITS:
        return int(text)
    if ago := _AGO.fullmatch(text):
        before = timedelta(milliseconds=duration_argument(ago[1]))
        return round((datetime.now(UTC) - before).timestamp() * 1000)
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            f"{shortened(text)!r} is not a time: write 2030-01-31T12:00:00+01:00, `90m ago` or now"
        ) from error


def due_argument(text: str) -> int:
    """The same of a delivery time, which may lie ahead."""
    return LATEST_DUE_MS if text in NEWEST else time_argument(text)


def count_argument(text: str) -> int:
    digits = text.lstrip("0") if text.isascii() and text.isdecimal() else ""
    if not digits:
        raise click.BadParameter(f"{shortened(text)!r} is not a count from 1")
    if len(digits) > 10 or int(digits) > MAX_COUNT:
        raise click.BadParameter(f"{shortened(text)!r} is over the limit of {MAX_COUNT}")
    return int(digits)


def offset_argument(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise click.BadParameter(f"{shortened(text)!r} is not a number from 0")
    return _at_most(MAX_OFFSET, text)


def queue_argument(text: str) -> int:
    return _at_most(MAX_COUNT, str(offset_argument(text)))


def _at_most(limit: int, text: str) -> int:
    if len(text) > 20 or int(text) > limit:
        raise click.BadParameter(f"{shortened(text)!r} is over the limit of {limit}")
    return int(text)


def range_argument(low: int, high: int) -> Callable[[str], int]:
    def number_argument(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not low <= int(text[:20]) <= high:
            raise click.BadParameter(f"{shortened(text)!r} is not a number from {low} to {high}")
        return int(text)

    return number_argument


def size_argument(text: str) -> int:
    try:
        return parse_size(text)
    except PopmqError as error:
        raise click.BadParameter(str(error)) from error


def property_argument(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.BadParameter(f"{shortened(text)!r} is not a property: write NAME=VALUE")
    return name, value


def shortened(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "..."


class Parsed(click.ParamType[Any]):
    """A type of one of the functions above, with its name in help texts."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> Any:
        return self._parse(value) if isinstance(value, str) else value


DURATION = Parsed("duration", duration_argument)
POSITIVE_DURATION = Parsed("duration", positive_duration_argument)
TIME = Parsed("time", time_argument)
DUE_TIME = Parsed("time", due_argument)
COUNT = Parsed("count", count_argument)
OFFSET = Parsed("offset", offset_argument)
QUEUE = Parsed("queue", queue_argument)
SIZE = Parsed("size", size_argument)
PORT = Parsed("port", range_argument(0, 65_535))
PROPERTY = Parsed("property", property_argument)
