"""LagReports: their CronJobs.

May import: kube, model, resources, popmq.common.
"""
