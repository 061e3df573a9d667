"""What is asked for: specs of custom resources, names, quantities, certificates and conditions,
as plain values.

Always holds: Pure: no clock, no network.

May import: popmq.common.
"""
