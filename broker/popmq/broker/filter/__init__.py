"""Filter expressions of subscriptions: tags and SQL-92, compiled once and run for each message.

Always holds: An expression costs at most its bound; a message that lacks a property is not
matched instead of failing.

May import: popmq.common.
"""
