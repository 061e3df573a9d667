"""One broker process: its roles as master or slave, files, threads, sockets, pacing and metrics.

Always holds: At most one Broker is on the disk at a time; what an earlier incarnation left cannot
write.

May import: core, diagnostics, ha, handlers, log, meta, persistence, store,
timer, popmq.common.
"""
