#!/usr/bin/env python3
"""`popmq report` for spark-submit, which starts files whose names end in .py."""

import sys

from popmq.cli.__main__ import main

sys.exit(main(["report", *sys.argv[1:]]))
