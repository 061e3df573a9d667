"""The Kubernetes operator: a BrokerCluster in, objects out (docs/concepts/operator.md).

Always holds: It keeps no state: a reconcile may be killed anywhere and is repeated.

May import: cluster, declared, kube, model, reports, popmq.common.
"""
