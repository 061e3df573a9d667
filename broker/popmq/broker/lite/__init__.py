"""Lite topics: small topics that their first message makes and that expire, and who is subscribed
to which.

Always holds: A lite topic is delivered in order to subscribed clients only.

May import: deliveries, fifo, meta, pop, store, popmq.common.
"""
