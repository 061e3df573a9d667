"""MessageStore, which joins log, index and persistence, and the same for a slave's copy of the
log.

Always holds: Every table changes through records of the log only, so replicas that applied the
same records are equal.

May import: index, log, persistence, popmq.common.
"""
