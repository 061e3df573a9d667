"""Topics, ConsumerGroups and Users as custom resources, followed in the cluster that they name.

Always holds: One object that is refused harms no other.

May import: cluster, kube, model, resources, popmq.common.
"""
