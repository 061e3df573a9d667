"""A report as a terminal's tables, a page, a page of metrics, or files.

May import: popmq.common, popmq.reports.
"""
