"""Pop consumption: receives, long polls, acks, changes of the invisible time, revival and dead
letters.

Always holds: A message is invisible for others until its time is over or its client releases it;
an ack that was answered OK is never undone.

May import: deliveries, filter, log, meta, store, popmq.common.
"""
