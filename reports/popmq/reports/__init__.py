"""Reports over what brokers keep: lag, revive, delay (docs/concepts/reports.md)."""
