"""One module for each page of the console: from what the client returns to HTML, without markup
in texts of others.  See docs/console.md.  May import: popmq.cli, popmq.common,
popmq.console.
"""
