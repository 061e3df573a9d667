"""What makes the tables survive: snapshots, checkpoints, recovery, retention and the files that
say how the store was closed.

Always holds: A snapshot and the log behind it give the tables that were; a segment is deleted
only when no table and no replica needs it.

May import: index, log, popmq.common.
"""
