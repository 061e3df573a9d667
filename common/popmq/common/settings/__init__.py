"""Every setting: its default, its unit, its bounds, and where it may come from.

Always holds: A refused value is named with its limit and its setting.

May import: popmq.common, wire.
"""
