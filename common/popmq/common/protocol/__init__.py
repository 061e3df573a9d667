"""Frames between popmq's processes and the payloads they carry.

Always holds: An older peer can ignore what is added; a field's meaning never changes.  No
request is served before its sender proved the cluster's secret, where one is needed, nor to a
role that may not send it.

May import: metric_table, record, settings, tls, wire, popmq.common.
"""
