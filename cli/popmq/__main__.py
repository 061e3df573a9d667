"""`python -m popmq` is the command `popmq`."""

import sys

from popmq.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
