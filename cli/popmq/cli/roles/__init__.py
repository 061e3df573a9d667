"""The long-running roles as processes: `popmq up`, controller, broker, proxy, operator, and the
supervisor of several.

Always holds: A role that fails ends its process within ten seconds.

May import: terminal, popmq.broker, popmq.cli, popmq.common, popmq.controller, popmq.operator,
popmq.proxy.
"""
