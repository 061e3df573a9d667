"""The house rules that a reader relies on and no tool checks: who imports whom, and what is where.

A room is a top folder with a popmq/ in it (broker/popmq/broker is popmq.broker).  The tables at
the top are meant to be edited, in the commit that needs it and with the reason in its message.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 600

# Which rooms a room may import.  Processes meet on the wire, so nobody looks sideways.
EVERY_ROOM = {"common", "broker", "proxy", "controller", "operator", "reports", "cli", "testing"}
ROOM_MAY_IMPORT: dict[str, set[str]] = {
    "common": set(),
    "broker": {"common"},
    "proxy": {"common"},
    "controller": {"common"},
    "operator": {"common"},
    "reports": {"common"},
    "cli": EVERY_ROOM,
    "testing": EVERY_ROOM,
}

# A top-level package of the reports, because Spark finds a data source by such a name.
SPARK_SOURCE = "pyspark_popmq"

# Which parts of the broker (a module or package directly in it) a part may import.
CORES = {"store", "meta", "filter"}
SERVICES = {"timer", "pop", "transaction", "ha"}
ON_BROKER = ["lookup_admin", "parking_admin", "lite_admin", "timer_drain", "timer_mover"]
ON_BROKER += ["reset_job", "lag_job", "letter_jobs", "timer_metrics", "explain_timer", "pulls"]
ON_BROKER += ["time_span_job"]
ON_BROKER += ["client_requests", "broker_life", "followership", "meta_follower", "meta_copies"]
ON_BROKER += ["system_lookup"]
BROKER_PART_MAY_IMPORT: dict[str, set[str]] = {
    "store": set(),
    "meta": {"store"},
    "filter": {"store"},
    "timer": CORES,
    "pop": CORES,
    "transaction": CORES,
    "ha": CORES,
    "report": CORES | SERVICES,
    "record_applier": CORES | SERVICES,
    "following": CORES | SERVICES | {"record_applier"},
    "replica_writer": CORES | SERVICES,
    "send_service": CORES | SERVICES,
    "arrivals": CORES | SERVICES | {"record_applier"},
    "broker": CORES
    | SERVICES
    | {"arrivals", "following", "record_applier", "replica_writer", "report", "send_service"},
    "metrics": CORES | SERVICES | {"broker", "timer_metrics"},
    **dict.fromkeys(ON_BROKER, CORES | SERVICES | {"broker"}),
    "lookup_admin": CORES | SERVICES | {"broker", "system_lookup"},
    "notifications": CORES | SERVICES | {"broker", "client_requests"},
    "admin": CORES | SERVICES | {"broker", "lookup_admin", "parking_admin", "timer_drain"},
    "jobs": CORES | SERVICES,
    "report_jobs": CORES | SERVICES | {"broker", "jobs", "report"},
    "explain_job": CORES | SERVICES | {"broker", "explain_timer"},
    "timer_jobs": CORES | SERVICES | {"broker", "jobs"},
    "offset_jobs": CORES | SERVICES | {"broker", "jobs", "pulls"},
    "transaction_jobs": CORES | SERVICES | {"broker", "jobs"},
    "pop_admin": CORES
    | SERVICES
    | {"broker", "explain_job", "jobs", "lag_job", "letter_jobs", "report_jobs", "reset_job"}
    | {"offset_jobs", "time_span_job", "timer_jobs", "transaction_jobs"},
    "server": CORES
    | SERVICES
    | {
        "broker",
        "admin",
        "client_requests",
        "jobs",
        "lite_admin",
        "meta_copies",
        "notifications",
        "pop_admin",
        "pulls",
        "transaction_jobs",
    },
    "gate": set(),
    "leadership": CORES | SERVICES | {"broker", "gate", "server"},
    "broker_node": CORES
    | SERVICES
    | {"broker", "broker_life", "followership", "gate", "leadership", "meta_follower", "server"}
    | {"timer_mover"},
    "replication_metrics": SERVICES | {"broker_node"},
    "rest": CORES | SERVICES | {"broker", "broker_node"},
    "process": CORES
    | SERVICES
    | {"metrics", "replication_metrics", "broker", "broker_node", "rest", "server"},
}

# Files that decide and therefore may not wait, look at a clock or throw dice by themselves.
CORE_PLACES = (
    "broker/popmq/broker/store",
    "broker/popmq/broker/meta",
    "broker/popmq/broker/pop",
    "broker/popmq/broker/timer",
    "broker/popmq/broker/transaction",
    "broker/popmq/broker/filter",
    "controller/popmq/controller/controller.py",
    "controller/popmq/controller/election.py",
    "controller/popmq/controller/failover.py",
    "controller/popmq/controller/long_polls.py",
    "controller/popmq/controller/replica_group.py",
    "controller/popmq/controller/replicas.py",
    "controller/popmq/controller/routes.py",
    "broker/popmq/broker/ha",
    "broker/popmq/broker/report",
    "operator/popmq/operator/resources",
    "operator/popmq/operator/actions.py",
    "operator/popmq/operator/certificates.py",
    "operator/popmq/operator/conditions.py",
    "operator/popmq/operator/declared.py",
    "operator/popmq/operator/desired.py",
    "operator/popmq/operator/lag_reports.py",
    "operator/popmq/operator/observed.py",
    "operator/popmq/operator/plan.py",
    "operator/popmq/operator/rollout.py",
    "operator/popmq/operator/spec.py",
    "operator/popmq/operator/status.py",
    "common/popmq/common/message.py",
    "common/popmq/common/receipt.py",
    "common/popmq/common/topics.py",
    "common/popmq/common/hop.py",
)
# Paths in CORE_PLACES that are shells after all, one a line with the reason.
# It writes the checkpoint on two threads, which take turns; it decides nothing by that.
SHELLS_AMONG_CORES = frozenset({"broker/popmq/broker/store/checkpoint_keeper.py"})

# A name ending in a dot stands for everything below it.
NOT_IN_A_CORE = (
    "time.time",
    "time.time_ns",
    "time.monotonic",
    "time.monotonic_ns",
    "time.perf_counter",
    "time.perf_counter_ns",
    "time.sleep",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "datetime.datetime.today",
    "datetime.date.today",
    "asyncio.sleep",
    "random.",
    "threading",
    "threading.",
    "uuid.uuid1",
    "uuid.uuid4",
)
FINE_IN_A_CORE = ("random.Random",)  # takes a seed


def rooms() -> list[str]:
    # charts/popmq is a chart and no import root.
    folders = [path.parent for path in ROOT.glob("*/popmq") if path.is_dir()]
    return sorted(one.name for one in folders if (one / "popmq" / one.name).is_dir())


def room_modules() -> list[Path]:
    return sorted(path for room in rooms() for path in (ROOT / room / "popmq").rglob("*.py"))


def is_generated(path: Path) -> bool:
    return path.stem.endswith(("_pb2", "_pb2_grpc"))


def written_modules() -> list[Path]:
    """Every module somebody wrote, shipped or not."""
    beside = [
        path for folder in ("tests", "bench", "tools") for path in (ROOT / folder).rglob("*.py")
    ] + list(ROOT.glob("testing/*.py"))
    return [path for path in room_modules() + sorted(beside) if not is_generated(path)]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(path: Path) -> str:
    """broker/popmq/broker/store/commit_log.py -> popmq.broker.store.commit_log"""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(tree: ast.Module, module: str) -> Iterator[str]:
    """Full dotted name of all that a module imports, anywhere in it, relative forms resolved.

    `from a.b import c` gives a.b.c whether c is a module or a name in one.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # popmq.x.__init__ is one part longer than its package, just like any module in it.
            above = module.split(".")[: -node.level] if node.level else []
            base = above + (node.module.split(".") if node.module else [])
            yield from (".".join([*base, alias.name]) for alias in node.names)


def part_of(name: str, depth: int) -> str | None:
    """The room (depth 1) or the part of a room (depth 2) that a popmq name lies in."""
    parts = name.split(".")
    if parts[0] == SPARK_SOURCE:
        parts = ["popmq", "reports", *parts]
    return parts[depth] if parts[0] == "popmq" and len(parts) > depth else None


def forbidden_imports(tree: ast.Module, module: str) -> Iterator[str]:
    room = part_of(module, 1)
    assert room is not None
    for name in imports_of(tree, module):
        target = part_of(name, 1)
        if target is not None and target != room and target not in ROOM_MAY_IMPORT[room]:
            yield f"{module} imports {name}"
        if room == target == "broker":
            yield from forbidden_in_broker(module, name)


def forbidden_in_broker(module: str, name: str) -> Iterator[str]:
    part, target = part_of(module, 2), part_of(name, 2)
    if part in (None, "__init__", target) or target in (None, "*"):
        return
    if target not in BROKER_PART_MAY_IMPORT.get(part, set()):
        yield f"{module} imports {name}"


def names_used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of each import and of each use of something imported."""
    meaning: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                meaning[alias.asname or first] = alias.name if alias.asname else first
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                meaning[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            tail = [node.attr]
            inner = node.value
            while isinstance(inner, ast.Attribute):
                tail.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in meaning:
                yield node.lineno, ".".join([meaning[inner.id], *reversed(tail)])


def is_forbidden_in_a_core(name: str) -> bool:
    if any(name == fine or name.startswith(f"{fine}.") for fine in FINE_IN_A_CORE):
        return False
    return any(name.startswith(n) if n.endswith(".") else name == n for n in NOT_IN_A_CORE)


def core_files() -> list[Path]:
    places = [ROOT / place for place in CORE_PLACES]
    files = [f for place in places for f in (place.rglob("*.py") if place.is_dir() else [place])]
    return sorted(file for file in files if shown(file) not in SHELLS_AMONG_CORES)


def test_imports_point_one_way() -> None:
    wrong = [w for path in room_modules() for w in forbidden_imports(parsed(path), dotted(path))]
    assert not wrong, "\n".join(wrong)


def test_every_room_has_its_row_in_the_table_of_imports() -> None:
    assert set(rooms()) <= set(ROOM_MAY_IMPORT)


def test_every_part_of_the_broker_has_its_row_in_the_table_of_imports() -> None:
    parts = {
        part
        for path in room_modules()
        if part_of(dotted(path), 1) == "broker" and (part := part_of(dotted(path), 2)) is not None
    }
    assert parts - {"__init__"} <= set(BROKER_PART_MAY_IMPORT)


def test_no_top_folder_and_no_namespace_folder_is_a_package() -> None:
    # operator/__init__.py would hide the standard library's operator from every interpreter
    # started here; popmq/__init__.py would hide the other rooms.
    wrong = [
        shown(path) for path in (*ROOT.glob("*/__init__.py"), *ROOT.glob("*/popmq/__init__.py"))
    ]
    assert not wrong


def test_tests_are_no_packages() -> None:
    assert not [shown(path) for path in (ROOT / "tests").rglob("__init__.py")]


def test_a_namespace_folder_holds_its_room_and_no_loose_module() -> None:
    wrong = [shown(path) for room in rooms() for path in (ROOT / room / "popmq").glob("*.py")]
    assert not wrong


def test_every_folder_of_a_room_that_holds_modules_is_a_package() -> None:
    folders = {path.parent for path in room_modules() if path.parent.name != "popmq"}
    assert not [shown(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_no_module_is_too_long_for_one_sitting() -> None:
    lengths = {shown(p): len(p.read_text(encoding="utf-8").splitlines()) for p in written_modules()}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_no_module_is_named_after_the_standard_library() -> None:
    own = [path.parent if path.stem == "__init__" else path for path in room_modules()]
    # The room itself may be (popmq.operator is): nothing ever puts popmq/ on the path.
    below_rooms = [path for path in own if path.parent.name != "popmq"]
    wrong = [shown(p) for p in below_rooms if p.stem in sys.stdlib_module_names]
    assert not wrong


def test_every_room_tells_type_checkers_that_it_is_typed() -> None:
    packages = [
        path.parent for room in rooms() for path in (ROOT / room).glob("popmq/*/__init__.py")
    ]
    assert not [shown(package) for package in packages if not (package / "py.typed").exists()]


def test_every_room_is_in_every_list_of_pyproject() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    build, tools = config["tool"]["hatch"]["build"], config["tool"]
    assert sorted(build["dev-mode-dirs"]) == rooms()
    wheel = build["targets"]["wheel"]["packages"]
    assert {f"{room}/popmq" for room in rooms()} <= set(wheel)
    for checked in (tools["mypy"]["files"], tools["mypy"]["mypy_path"].split(":")):
        assert {*rooms(), "tests"} <= set(checked)


def test_cores_neither_wait_nor_look_at_the_clock_nor_throw_dice() -> None:
    wrong = [
        f"{shown(path)}:{line}: {name}"
        for path in core_files()
        for line, name in names_used(parsed(path))
        if is_forbidden_in_a_core(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_lists_of_cores_and_shells_name_what_exists() -> None:
    named = [*CORE_PLACES, *SHELLS_AMONG_CORES]
    assert not [path for path in named if not (ROOT / path).exists()]


def test_everyday_tests_are_collected_without_the_extras_that_make_test_does_not_install() -> None:
    """A tree in which the heavy tests ran once has them all, and hides such an import."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = config["project"]["optional-dependencies"]
    hidden = [
        re.split("[^A-Za-z0-9_]", wanted)[0]
        for extra in ("reports", "reports-java", "fuzz")
        for wanted in extras[extra]
    ]
    assert "pyarrow" in hidden
    users = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search("|".join(["popmq.reports", *hidden]), path.read_text(encoding="utf-8"))
    ]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({hidden}))
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *{users}]))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:]


def test_every_module_says_what_it_is_for() -> None:
    assert not [shown(path) for path in written_modules() if not ast.get_docstring(parsed(path))]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("popmq.proxy.route", "import popmq.broker.store"),
        ("popmq.proxy.route", "from popmq import broker"),
        ("popmq.common.frames", "def later():\n    from popmq.cli import main"),
        ("popmq.broker.store.dispatch", "from popmq.broker.pop.long_polling import LongPolling"),
        ("popmq.broker.store.dispatch", "from ..pop import long_polling"),
        ("popmq.broker.store.__init__", "from .. import meta"),
        ("popmq.broker.pop.pop_service", "from popmq.broker import broker"),
        ("popmq.broker.filter.tag", "from popmq.broker.meta.registry import Registry"),
        ("popmq.broker.server", "import popmq.broker.process"),
    ],
)
def test_the_import_guard_bites(module: str, source: str) -> None:
    assert list(forbidden_imports(ast.parse(source), module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("popmq.proxy.route", "from popmq.common.errors import PopmqError"),
        ("popmq.testing.broker", "from popmq.broker.broker import Broker"),
        ("popmq.broker.pop.pop_service", "from popmq.broker.store.commit_log import CommitLog"),
        ("popmq.broker.pop.pop_service", "from . import order_info"),
        ("popmq.broker.pop.__init__", "from .order_info import OrderInfo"),
        ("popmq.broker.process", "from popmq.broker.server import serve"),
    ],
)
def test_the_import_guard_lets_the_allowed_pass(module: str, source: str) -> None:
    assert not list(forbidden_imports(ast.parse(source), module))


@pytest.mark.parametrize(
    ("source", "forbidden"),
    [
        ("import time as t\nnow = t.time()", True),
        ("from time import monotonic", True),
        ("import datetime\nd = datetime.datetime.now()", True),
        ("from datetime import datetime as dt\nd = dt.now()", True),
        ("import random\nrandom.choice([1])", True),
        ("from random import shuffle", True),
        ("import asyncio\nasync def f():\n    await asyncio.sleep(1)", True),
        ("import threading", True),
        ("from threading import Lock", True),
        ("import random\nr = random.Random(7)\nr.choice([1])", False),
        ("from random import Random", False),
        ("def f(clock):\n    return clock.time.time()", False),
        ("import time\nt = time.gmtime(0)", False),
    ],
)
def test_the_guard_of_cores_tells_a_clock_from_its_likes(source: str, forbidden: bool) -> None:
    names = [name for _, name in names_used(ast.parse(source))]
    assert any(map(is_forbidden_in_a_core, names)) is forbidden
