"""The cluster's simulator: brokers, controllers, proxies and clients over a network with faults.

Always holds: One seed gives one trace.

May import: disk, harness, oracle, sim, popmq.broker, popmq.common, popmq.controller.
"""
