"""Broker: one store with its services, applying records and running their steps; without network,
threads or a clock of its own.

Always holds: Records are applied in the order of the log, by the same code on masters, slaves and
at recovery.

May import: deliveries, diagnostics, fifo, filter, index, lite, log, meta, operations,
persistence, pop, store, timer, transaction, popmq.common.
"""
