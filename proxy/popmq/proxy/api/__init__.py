"""The public protocol: its definitions and the modules generated from them.

May import: no other package of popmq.
"""
