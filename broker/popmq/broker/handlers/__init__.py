"""Requests from proxies, controllers and other brokers: decoded, given to the core, and answered
when confirmed.

Always holds: A reply that says OK leaves only when its records are confirmed.

May import: core, deliveries, diagnostics, fifo, filter, index, lite, log, meta, operations, pop,
store, timer, transaction, popmq.common.
"""
