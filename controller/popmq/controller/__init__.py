"""The controller: elects masters, keeps epochs and SyncStateSets, and answers routes.

Always holds: A master is elected from the SyncStateSet only, by compare-and-set of the broker
group's record.

May import: popmq.common.
"""
