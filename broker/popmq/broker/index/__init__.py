"""The key index: which messages carry a key or a message id, in files that are sealed and merged.

Always holds: Every unit names a record at or above the log's start; an index that lags behind the
log is completed from it.

May import: log, popmq.common.
"""
