"""Values of topics and consumer groups as they are written in a command line."""

import argparse

from popmq.cli.messages import duration_argument


def back_off_argument(text: str) -> tuple[int, ...]:
    """`1s,5s,10s` in milliseconds: the wait after each failed delivery, the last one repeated."""
    return tuple(map(duration_argument, text.split(",")))


def broker_groups_argument(text: str) -> tuple[str, ...]:
    """`broker-a,broker-b`, checked by the broker."""
    return tuple(text.split(","))


def retention_argument(text: str) -> int:
    """Milliseconds; -1 says: that of the store."""
    return -1 if text == "store" else _not_zero(text, "store")


def lite_ttl_argument(text: str) -> int:
    """Milliseconds; -1 says: what the setting says."""
    return -1 if text == "default" else _not_zero(text, "default")


def _not_zero(text: str, instead: str) -> int:
    """0 is how a request says that nothing was said."""
    if milliseconds := duration_argument(text):
        return milliseconds
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is no time: write 1h, or `{instead}`")


def multiplier_argument(text: str) -> int:
    """In thousandths: `1.5` is 1500."""
    whole, _, part = text.partition(".")
    digits = whole + part
    if (
        not whole
        or len(digits) > 9
        or len(part) > 3
        or not (digits.isascii() and digits.isdecimal())
    ):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a multiplier: write 2 or 1.5")
    return int(whole) * 1000 + int(part.ljust(3, "0"))


def percent_argument(text: str) -> int:
    digits = text.removesuffix("%")
    if len(digits) > 3 or not (digits.isascii() and digits.isdecimal()) or int(digits) > 100:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a percentage: write 20%")
    return int(digits)
