"""Clients of the API server and of the admin service, watches, and the Lease of the acting
operator.

Always holds: Only the holder of the Lease writes.

May import: model, popmq.common.
"""
