"""TLS of one connection as bytes in and bytes out, and certificates that change while it runs.

Always holds: A pair of files that cannot be used leaves the one before.

May import: popmq.common.
"""
