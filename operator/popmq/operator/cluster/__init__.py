"""BrokerClusters: observe, plan, apply, act, and write the status.

Always holds: Never more than one broker of a group is taken away on purpose at a time.

May import: kube, model, reports, resources, popmq.common.
"""
