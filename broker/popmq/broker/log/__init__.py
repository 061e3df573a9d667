"""The commit log and what is derived from it record by record: segment files, group commit,
consume queues, dispatch, and reads of messages.

Always holds: Positions only grow; a record is dispatched once it is confirmed, in the order of
the log; what lies behind the durable position was synced.

May import: popmq.common.
"""
