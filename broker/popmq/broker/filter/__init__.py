"""Filter expressions of a subscription: tags and SQL-92."""
