"""What pytest loads where popmq is installed; all of it is in popmq.testing.pytest_plugin.

Top-level, because pytest guesses the modules to look into from the names of top-level ones.
"""

from popmq.testing.pytest_plugin import popmq_broker, pytest_configure

__all__ = ["popmq_broker", "pytest_configure"]
