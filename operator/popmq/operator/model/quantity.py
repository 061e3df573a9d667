"""Quantities of Kubernetes (`20Gi`, `500m`) as exact numbers, so that they can be compared."""

import re
from decimal import Decimal

from popmq.common.errors import ConfigError

_FORM = re.compile(
    r"(\d+(?:\.\d*)?|\.\d+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?\d+)?", re.ASCII
)
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def parse_quantity(text: object) -> Decimal:
    """Raises ConfigError for what is no quantity."""
    match = _FORM.fullmatch(str(text).strip())
    if not match:
        raise ConfigError(f"{text!r} is not a quantity: write 20Gi, 500M or 0.5")
    number, unit = Decimal(match[1]), match[2] or ""
    if unit == "m":
        return number / 1000
    if len(unit) > 1 and unit[0] in "eE":
        return number * Decimal(10) ** int(unit[1:])
    if unit.endswith("i"):
        return number * Decimal(1024) ** _POWERS["k" if unit == "Ki" else unit[0]]
    return number * Decimal(1000) ** _POWERS[unit]
