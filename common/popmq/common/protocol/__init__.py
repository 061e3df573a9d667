"""Frames between popmq's processes and the payloads they carry.

Always holds: An older peer can ignore what is added; a field's meaning never changes.

May import: metric_table, record, popmq.common.
"""
