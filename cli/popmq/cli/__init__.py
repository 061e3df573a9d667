"""The popmq command line.

May import: popmq.broker, popmq.common, popmq.proxy, popmq.reports.
"""
