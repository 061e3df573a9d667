"""The admin calls: topics, groups, resets, explain, reports, of popmq's own and of the public
API.

Always holds: A change is sent to every broker group that it concerns, or refused.

May import: api, auth, brokers, messaging, rpc, transport, transport.lean, popmq.common.
"""
