"""What each setting means: `popmq config explain`, and docs/reference/settings.md.

The sentences are in meanings.toml; defaults and limits are those of the code.
"""

import re
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from popmq.common.errors import Code, Refused
from popmq.common.quantities import GIB, KIB, MIB, format_duration
from popmq.common.settings.section import shown
from popmq.common.settings.settings import Settings, variable_of

_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")

_LIMITS = re.compile(r"(\d+) to (\d+)")


@dataclass(frozen=True, slots=True)
class SettingDescription:
    """`meaning` has Markdown; `allowed` is empty where any value of the default's type is."""

    key: str
    meaning: str
    unit: str
    default: object
    allowed: str

    @property
    def variable(self) -> str:
        return variable_of(self.key)

    @property
    def plain_meaning(self) -> str:
        return _LINK.sub(r"\1", self.meaning).replace("`", "")


def describe(key: str) -> SettingDescription:
    """By its key, or by its environment variable; raises NOT_FOUND, with the nearest keys, for
    what is no setting."""
    import difflib

    known = descriptions()
    by_variable = {described.variable: described for described in known.values()}
    if key in known or key in by_variable:
        return known.get(key) or by_variable[key]
    near = [name for name in known if name.startswith(f"{key}.")]
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f"did you mean {', '.join(near)}?" if near else "`popmq config` shows all"
    raise Refused(Code.NOT_FOUND, f"no setting {key}: {hint}")


@cache
def descriptions() -> dict[str, SettingDescription]:
    """Of every setting, in the order of the code."""
    path = Path(__file__).parent / "meanings.toml"
    meanings = tomllib.loads(path.read_text(encoding="utf-8"))
    settings = Settings()
    described = {}
    for section in fields(settings):
        for item in fields(getattr(settings, section.name)):
            if item.metadata.get("constant", False):
                continue
            key = f"{section.name}.{item.name}"
            default = getattr(getattr(settings, section.name), item.name)
            allowed = item.metadata.get("allowed", "")
            allowed = "true or false" if isinstance(default, bool) else allowed
            if limits := _LIMITS.fullmatch(allowed):
                low, high = (format_value(key, int(limit)) for limit in limits.groups())
                allowed = f"{low} to {high}"
            meaning = meanings[section.name][item.name]
            described[key] = SettingDescription(key, meaning, _unit(key), default, allowed)
    return described


def format_value(key: str, value: object) -> str:
    """As a person writes it: `64 MiB`, `12h`, `empty`."""
    if isinstance(value, int) and not isinstance(value, bool):
        if key.endswith("_ms"):
            return format_duration(value) if value else "0"
        for name, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
            if "bytes" in key and value and value % size == 0:
                return f"{value // size} {name}"
    return shown(value) or "empty"


def _unit(key: str) -> str:
    if key.endswith("_ms"):
        return "milliseconds, or as in 90s"
    return "bytes, or as in 4MiB" if key.endswith("_bytes") else ""
