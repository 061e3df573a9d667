"""Commands for this machine's files that need no proxy: doctor, contexts, completion, settings.

May import: popmq.cli, terminal, popmq.broker, popmq.common.
"""
