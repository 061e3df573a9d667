"""Durations and sizes as people write them: `90s`, `4MiB`."""

import re

from popmq.common.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HOUR_MS, DAY_MS = 3_600_000, 86_400_000


def parse_duration_ms(text: str) -> int:
    """`250ms`, `90s`, `5m`, `1h` or `3d` in milliseconds; ConfigError for anything else."""
    match = re.fullmatch(r"(\d+)(ms|s|m|h|d)", text.strip(), re.ASCII)
    if not match:
        raise ConfigError(f"{text!r} is not a duration: write 250ms, 90s, 5m, 1h or 3d")
    units = {"ms": 1, "s": 1000, "m": 60_000, "h": HOUR_MS, "d": DAY_MS}
    return int(match[1]) * units[match[2]]


def parse_size(size: str | int) -> int:
    """`4MiB`, `64KiB`, `1GiB` or a count in bytes; ConfigError for anything else."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"(\d+) ?(B|KiB|MiB|GiB|TiB)?", str(size).strip(), re.ASCII)
    if not match:
        raise ConfigError(f"{size!r} is not a size: write 64KiB, 4MiB, 1GiB or a count in bytes")
    units = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": GIB << 10}
    return int(match[1]) * units[match[2] or "B"]
