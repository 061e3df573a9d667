"""Helpers for testing code that uses popmq; shipped with it."""
