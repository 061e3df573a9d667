"""HTTP/2 and gRPC by ourselves, at microseconds a call (docs/concepts/transport.md).

Always holds: Every buffer has a bound; a client that breaks one harms only its own connection.

May import: transport, popmq.common.
"""
