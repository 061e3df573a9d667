"""The popmq command line."""
