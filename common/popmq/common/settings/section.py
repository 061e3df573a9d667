"""What a section of the settings is made of: values with checks, and the error that names them."""

import re
from collections.abc import Callable
from dataclasses import field, fields
from typing import TypeVar

from popmq.common.errors import ConfigError

T = TypeVar("T")

# A check returns what is wrong with the value, or "".
Check = Callable[[T], str]


def checked(default: T, check: Check[T], allowed: str = "") -> T:
    """`allowed` says in words which values pass."""
    return field(default=default, metadata={"check": check, "allowed": allowed})


def constant(value: T) -> T:
    """No setting: only code and tests may choose another value."""
    return field(default=value, metadata={"constant": True})


def within(default: int, low: int, high: int) -> int:
    def check(value: int) -> str:
        if value < low:
            return f"at least {low}"
        return f"at most {high}" if value > high else ""

    return checked(default, check, f"{low} to {high}")


def matching(default: str, pattern: str, what: str) -> str:
    return checked(default, lambda value: "" if re.fullmatch(pattern, value) else what, what)


def name_of(default: str, *, optional: bool = False) -> str:
    # A topic name holds the cluster's and a receipt handle the broker's, so both stay short.
    least = 0 if optional else 1
    what = "1 to 100 letters, digits, _ or -"
    return matching(default, rf"[a-zA-Z0-9_-]{{{least},100}}", what)


def one_of(default: str, *choices: str, **refused: str) -> str:
    def check(value: str) -> str:
        return "" if value in choices else refused.get(value, "one of " + ", ".join(choices))

    return checked(default, check, "one of " + ", ".join(choice or "empty" for choice in choices))


def shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


class SettingsSection:
    """Checks each setting by itself, then `relations` between settings of the section."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            check: Check[object] | None = item.metadata.get("check")
            complaint = check(getattr(self, item.name)) if check else ""
            if complaint:
                raise self.refuse(item.name, complaint)
        self.relations()

    def relations(self) -> None: ...

    def refuse(self, key: str, complaint: str) -> ConfigError:
        section = type(self).__name__.removesuffix("Settings").lower()
        return ConfigError(f"{section}.{key} = {shown(getattr(self, key))}: {complaint}")
