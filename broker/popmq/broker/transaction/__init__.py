"""Transactions: half messages, their ends, and checks (docs/concepts/transactions.md)."""
