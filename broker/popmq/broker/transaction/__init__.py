"""Transactions: half messages, their ends, and checks with producers.

Always holds: A half message is delivered only after its commit; each half message ends once.

May import: index, log, meta, persistence, store, popmq.common.
"""
