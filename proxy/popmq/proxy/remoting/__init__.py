"""RocketMQ's Remoting protocol: clients of RocketMQ 4 and 5 over binary TCP frames
(docs/concepts/remoting.md).

Always holds: Every frame is bounded before it is read, and a one-way request is never answered.

May import: auth, api, brokers, messaging, rpc, transport, popmq.common.
"""
