"""The messaging calls: send, receive, ack, pull, recall, transactions, lite subscriptions and
telemetry.

Always holds: A call answers OK only when a broker did.

May import: api, auth, brokers, rpc, transport, popmq.common.
"""
