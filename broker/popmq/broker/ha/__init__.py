"""Replication: who is master, what slaves copy, and what counts as confirmed."""
