"""What every simulated world needs: a broker without a network, a clock, and counts of rare
states.

May import: disk, popmq.broker, popmq.common.
"""
