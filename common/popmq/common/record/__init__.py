"""Records as they are on the disk: messages, receipts, tokens of timers and transactions.

Always holds: Bytes that were written stay readable by later versions.

May import: popmq.common.
"""
