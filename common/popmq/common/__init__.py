"""What every popmq process shares: names, addresses, errors, clocks, the step loop, logs and
metrics.
"""
