"""Each branch of the lanes, taken both ways by their tests and by random turns, or named.

cd tests && python -m proxy.lane_branches [--turns N]
"""

import argparse
import importlib
import logging
import pkgutil
import sys
from pathlib import Path

import pytest
from proxy.branches import Branches
from proxy.lane_world import run

from popmq.common.varint import read_varint
from popmq.proxy import lanes
from popmq.proxy.rpc.wire_scan import only_content
from popmq.proxy.transport.lean import lanes as transport_lanes

SEED = 1_000
TESTS = ("test_lanes.py", "test_ordinary_send.py")
HELPERS = (only_content, read_varint)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=1_500)
    given = parser.parse_args()
    names = [module.name for module in pkgutil.iter_modules(lanes.__path__)]
    modules = [importlib.import_module(f"{lanes.__name__}.{name}") for name in names]
    branches = Branches([*modules, transport_lanes, *HELPERS])
    files = [str(Path(__file__).with_name(name)) for name in TESTS]
    with branches.watched():
        failed = pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not more", *files])
        logging.disable()  # of the faults of a broker, which are many
        run(SEED, given.turns)
    print("\n".join(branches.summary()))
    missed = branches.missed()
    print("\n".join(missed))
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
