"""The Kubernetes objects of a BrokerCluster, as pure functions of its spec.

Always holds: The same spec gives the same objects.

May import: model, popmq.common.
"""
