"""Broker groups as a proxy sees them: routes, connections, metadata kept for a second, batches of
requests, and merged replies.

Always holds: Requests go to the master of the newest epoch that is known.

May import: rpc, popmq.common.
"""
