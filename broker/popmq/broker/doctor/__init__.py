"""`popmq doctor`: examines a store that is not open, rehearses its start and repairs what can be
repaired.

Always holds: An examination changes nothing; a repair saves what it removes and never removes a
confirmed record without --accept-loss.

May import: log, persistence, store, popmq.common.
"""
