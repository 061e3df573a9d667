"""Settings of the web console."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from popmq.common.settings.section import SettingsSection, checked

_URL = "http://HOST... or https://HOST... without a user, or empty"


def bad_url(value: str) -> str:
    """What is wrong with it.  A user in it would be shown wherever the setting is."""
    try:
        parts = urlsplit(value)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in value
        is_good = is_good and (parts.port or 1) > 0 and value.isprintable() and " " not in value
    except ValueError:  # the port is none
        is_good = False
    return "" if is_good else _URL


def _bad_prometheus(value: str) -> str:
    return bad_url(value) if value else ""


def _bad_reports(value: str) -> str:
    return bad_url(value) if "://" in value else ""


@dataclass(frozen=True, slots=True)
class ConsoleSettings(SettingsSection):
    prometheus: str = checked("", _bad_prometheus, _URL)
    reports: str = checked("", _bad_reports, "a folder, a URL, or empty")
