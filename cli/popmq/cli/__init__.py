"""The popmq command line: the commands that speak to a proxy, and how all of them are run.

May import: terminal, popmq.common, popmq.proxy, popmq.reports.
"""
