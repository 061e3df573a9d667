"""The version of popmq: the number that pyproject.toml gives to the package.

A constant, as looking it up in the package's metadata takes longer than `popmq --version` may.
"""

VERSION = "0.1.0"
