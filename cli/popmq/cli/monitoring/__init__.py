"""Files that are generated from the table of metrics: the reference page, dashboards and alert
rules.

May import: popmq.common.
"""
