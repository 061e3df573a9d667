"""What operators and pull consumers do with offsets: resets, redrives, pulls, and reads that go
on over several steps.

Always holds: A read that needs the disk never blocks the loop: it is resumed in a later step.

May import: deliveries, filter, index, log, meta, pop, store, timer, popmq.common.
"""
