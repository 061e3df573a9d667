"""The proxy: speaks the public gRPC API and keeps no state of its own.

Always holds: Any proxy can answer any request of any client.

May import: admin, auth, brokers, lanes, messaging, remoting, rpc, transport, transport.lean,
popmq.common.
"""
