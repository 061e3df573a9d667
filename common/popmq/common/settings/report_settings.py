"""Settings of what a broker keeps and reads for reports."""

from dataclasses import dataclass

from popmq.common.quantities import DAY_MS, MIB
from popmq.common.settings.section import SettingsSection, constant, within


@dataclass(frozen=True, slots=True)
class ReportsSettings(SettingsSection):
    sample_interval_ms: int = within(30_000, 0, DAY_MS)  # 0: only when a report asks
    sample_bytes: int = constant(16 * MIB)  # of memory, for each of three tables
    read_bytes_per_second: int = within(50_000_000, 100_000, 10_000_000_000)
