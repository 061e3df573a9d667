"""The web console: pages about a cluster, of a process of its own.

Pages are plain functions over one typed client, which asks a proxy what the commands ask it too.
The console keeps nothing on disk, and the answer to a request holds all that the page shows.  See
docs/console.md.  May import: popmq.cli, popmq.common.
"""
