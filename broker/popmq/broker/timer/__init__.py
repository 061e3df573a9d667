"""Messages that are delivered at a time that the sender chose: wheel, timer log, queue of the
system topic, recall and migration.

Always holds: A timer is stored in its topic exactly once, never before its time, or recalled,
across restarts and changes of master.

May import: log, meta, persistence, store, popmq.common.
"""
