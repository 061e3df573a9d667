"""When a message is to be delivered: what its sender says, in the terms of a put.

A sender names a time (`delivery_timestamp`) or, as a user property, a duration that counts from
the broker's getting the message, whatever the sender's clock says.  The broker decides by its own
clock; the proxy's only keeps what is out of all proportion from going there.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from popmq.common.errors import Code, Refused
from popmq.common.quantities import format_duration, iso_time
from popmq.common.settings.settings import TimerSettings
from popmq.proxy.rpc.validate import DELAY_KEYS, MessageFacts

SPREAD_MS = "TIMER_SPREAD_MS"
MAX_SPREAD_MS = (1 << 32) - 1
# Clocks of proxy and broker may differ by so much before one takes what the other refuses.
CLOCKS_APART_MS = 60_000
_NUMBER = re.compile(r"[0-9]{1,18}")


class Delay(NamedTuple):
    """As in `PutEntry`."""

    due_ms: int = 0
    spread_ms: int = 0


NO_DELAY = Delay()
TTL_MS = "TTL_MS"
MAX_TTL_MS = 100 * 366 * 86_400_000


def deadline_of(facts: MessageFacts, delay: Delay, *, now_ms: int) -> int:
    """When the message is not delivered any more: so long after it came, or is due; 0 for never.

    Raises ILLEGAL_MESSAGE_PROPERTY_KEY for what is no such time.
    """
    text = facts.user_properties.get(TTL_MS)
    if text is None:
        return 0
    if not (_NUMBER.fullmatch(text) and 0 < int(text) <= MAX_TTL_MS):
        raise Refused(
            Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
            f"user property {TTL_MS} = {text[:40]!r} is no whole number from 1 to {MAX_TTL_MS}",
        )
    visible_ms = now_ms - delay.due_ms if delay.due_ms < 0 else max(now_ms, delay.due_ms)
    return visible_ms + delay.spread_ms + int(text)


def delay_of(facts: MessageFacts, limits: TimerSettings, *, now_ms: int) -> Delay:
    """Raises ILLEGAL_DELIVERY_TIME for a contradiction, no number, and too late a time."""
    properties = facts.user_properties
    if facts.deliver_at_ms is None and not properties:
        return NO_DELAY
    named = [key for key in DELAY_KEYS if key in properties]
    if facts.deliver_at_ms is not None:
        named.insert(0, "delivery_timestamp")
    if len(named) > 1:
        raise _illegal(f"{' and '.join(named)} both say when to deliver the message: set one")
    if not named:
        if SPREAD_MS in properties:
            raise _illegal(
                f"user property {SPREAD_MS} on a message without a delivery time: set "
                f"delivery_timestamp or the user property {' or '.join(DELAY_KEYS)}"
            )
        return NO_DELAY
    spread_ms = _number(properties, SPREAD_MS) if SPREAD_MS in properties else 0
    if spread_ms > MAX_SPREAD_MS:
        raise _illegal(
            f"user property {SPREAD_MS} of {spread_ms} ms is over the limit of {MAX_SPREAD_MS} ms"
        )
    if facts.deliver_at_ms is None:
        (key,) = named
        delay_ms = _number(properties, key) * DELAY_KEYS[key]
        _check_ahead(key, delay_ms + spread_ms, spread_ms, limits.max_delay_ms)
        return Delay(-delay_ms, spread_ms)
    ahead_ms = facts.deliver_at_ms - now_ms
    if ahead_ms + spread_ms > limits.max_delay_ms + CLOCKS_APART_MS:
        _check_ahead(
            f"delivery_timestamp {iso_time(facts.deliver_at_ms)}",
            ahead_ms + spread_ms,
            spread_ms,
            limits.max_delay_ms,
        )
    if ahead_ms < -CLOCKS_APART_MS:
        return NO_DELAY
    return Delay(facts.deliver_at_ms, spread_ms)


def _check_ahead(what: str, ahead_ms: int, spread_ms: int, limit_ms: int) -> None:
    if ahead_ms > limit_ms:
        spread = f" with {SPREAD_MS} {spread_ms}" if spread_ms else ""
        ahead = format_duration(-(-ahead_ms // 1000) * 1000)
        raise _illegal(
            f"{what}{spread} lies {ahead} ahead, over the limit of {format_duration(limit_ms)} "
            "(timer.max_delay_ms)"
        )


def _number(properties: Mapping[str, str], key: str) -> int:
    text = properties[key]
    if not _NUMBER.fullmatch(text):
        raise _illegal(
            f"user property {key} = {text[:40]!r} is no whole number from 0 of at most 18 digits"
        )
    return int(text)


def _illegal(sentence: str) -> Refused:
    return Refused(Code.ILLEGAL_DELIVERY_TIME, sentence)
