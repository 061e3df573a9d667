"""Delivery in order of message groups, and parking of keys that do not advance.

Always holds: At most one open delivery for each key of a group, in the order of the queue.

May import: deliveries, filter, log, meta, pop, store, popmq.common.
"""
