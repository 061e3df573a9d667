"""Replication: who is master, what slaves copy, what counts as confirmed, and the reports to
controllers.

Always holds: Confirmed means held by every replica of the SyncStateSet; one master per epoch; a
replica truncates only what was not confirmed.

May import: log, persistence, store, popmq.common.
"""
