"""The table of every metric, from which the metrics, their page, dashboards and alerts are made.

Always holds: A metric that is not in the table cannot be shown.

May import: popmq.common.
"""
