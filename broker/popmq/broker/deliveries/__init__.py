"""The tables of what is delivered and not finished: check points, queue progress, order of keys,
parked keys and what became of deliveries that ended.

Always holds: Each delivery ends once; the committed offset passes a message only when its
delivery ended; all tables are functions of the log.

May import: log, meta, persistence, store, popmq.common.
"""
