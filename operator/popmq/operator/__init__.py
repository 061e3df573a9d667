"""The Kubernetes operator: a BrokerCluster in, objects out (docs/concepts/operator.md)."""
