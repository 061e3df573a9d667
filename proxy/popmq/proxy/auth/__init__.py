"""Who calls, and what they may: users, signatures, policies, and the gate before every handler.

Always holds: While auth.mode is off a call costs one attribute test; a matching Deny wins; every
method has a row of rights.

May import: api, brokers, rpc, transport, popmq.common.
"""
