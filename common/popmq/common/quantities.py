"""Durations, times and sizes as people write them: `90s`, `2030-01-31T12:00:00+00:00`, `4MiB`."""

import re
from datetime import UTC, datetime

from popmq.common.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HOUR_MS, DAY_MS = 3_600_000, 86_400_000


_UNITS_MS = {"d": DAY_MS, "h": HOUR_MS, "m": 60_000, "s": 1000, "ms": 1}
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+)s)?(?:(\d+)ms)?", re.ASCII)


def parse_duration_ms(text: str) -> int:
    """`250ms`, `90s`, `5m`, `1h30m` or `3d` in milliseconds; ConfigError for anything else."""
    match = _DURATION.fullmatch(text.strip())
    if not match or not any(match.groups()):
        raise ConfigError(f"{text!r} is not a duration: write 250ms, 90s, 5m, 1h30m or 3d")
    return sum(
        int(number) * unit_ms
        for number, unit_ms in zip(match.groups(), _UNITS_MS.values(), strict=True)
        if number
    )


def format_duration(milliseconds: int) -> str:
    """As `parse_duration_ms` reads it: 90000 is 1m30s."""
    left_ms, parts = milliseconds, []
    for unit, unit_ms in _UNITS_MS.items():
        number, left_ms = divmod(left_ms, unit_ms)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts) or "0ms"


def iso_time(milliseconds: int) -> str:
    """In UTC; what no calendar holds stays a number."""
    try:
        moment = datetime.fromtimestamp(milliseconds // 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds}ms"
    return moment.replace(microsecond=milliseconds % 1000 * 1000).isoformat(timespec="milliseconds")


def parse_size(size: str | int) -> int:
    """`4MiB`, `64KiB`, `1GiB` or a count in bytes; ConfigError for anything else."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"(\d+) ?(B|KiB|MiB|GiB|TiB)?", str(size).strip(), re.ASCII)
    if not match:
        raise ConfigError(f"{size!r} is not a size: write 64KiB, 4MiB, 1GiB or a count in bytes")
    units = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": GIB << 10}
    return int(match[1]) * units[match[2] or "B"]
