"""Settings of two kinds of sends that a broker remembers: resends, and half messages."""

from dataclasses import dataclass

from popmq.common.quantities import DAY_MS, HOUR_MS
from popmq.common.settings.section import SettingsSection, within


@dataclass(frozen=True, slots=True)
class DedupSettings(SettingsSection):
    """Of message ids that were sent already."""

    window_ms: int = within(600_000, 0, 7 * DAY_MS)  # 0: a resend is another message
    max_ids: int = within(500_000, 1, 100_000_000)  # about 200 bytes of memory each


@dataclass(frozen=True, slots=True)
class TransactionSettings(SettingsSection):
    first_check_ms: int = within(6_000, 1, HOUR_MS)  # of log time, like the others
    check_interval_ms: int = within(30_000, 1, DAY_MS)
    max_checks: int = within(15, 1, 1_000)  # of one transaction, each by a producer
    keep_ms: int = within(3 * DAY_MS, 1_000, 366 * DAY_MS)  # while there is no producer to ask
    max_pending: int = within(1_000_000, 1, 100_000_000)
