"""A disk in memory that keeps only what was synced, and the faults it can have.

Always holds: A crash leaves what POSIX allows, chosen by the seed.

May import: popmq.common.
"""
