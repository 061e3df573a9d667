"""The broker: stores, delivers, delays and replicates messages.

May import: no other package of popmq.
"""
