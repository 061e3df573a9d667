"""The HTTP side of the console: routes, checks of requests, and the command that serves them.
See docs/console.md.  May import: pages, popmq.cli, popmq.common, popmq.console.
"""
