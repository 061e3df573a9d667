"""Topics, consumer groups, lite topics and committed offsets, as records of the log, and their
resolution by name.

Always holds: An id is never used again; a copied table follows its owner's (epoch, version) and
never goes back.

May import: log, store, popmq.common.
"""
