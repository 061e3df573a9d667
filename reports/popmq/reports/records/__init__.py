"""Raw records of brokers into tables: layouts, names behind ids, columns, and a recount.

May import: popmq.common.
"""
