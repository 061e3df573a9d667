"""Bytes of the public API into calls and back: the interface of handlers, and grpcio to compare
with.

Always holds: Handlers see neither sockets nor frames.

May import: popmq.common.
"""
