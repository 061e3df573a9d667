"""What every call of the public API shares: its life, conversion, validation, namespaces and
metrics.

Always holds: Refusals become public codes in `convert.py` only.

May import: api, transport, popmq.common.
"""
