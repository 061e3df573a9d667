"""What clients may observe: the history of each message and the rules that it is checked against.

Always holds: An excuse always has a bound.

May import: no other package of popmq.
"""
