"""What a BrokerCluster becomes: pure functions from its spec to plain objects of Kubernetes."""
