"""Ordinary sends and acks, as many at a time as came together (docs/concepts/transport.md).

Always holds: A lane does with a call what its general path would.

May import: api, brokers, messaging, rpc, transport, popmq.common.
"""
