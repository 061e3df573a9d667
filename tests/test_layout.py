"""The house rules that a reader relies on and no tool checks: who imports whom, and what is where.

A room is a top folder with a popmq/ in it (broker/popmq/broker is popmq.broker).  The tables at
the top are meant to be edited, in the commit that needs it and with the reason in its message.
"""

import ast
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 600
MAX_MODULES = 22  # in one package
MAX_MODULES_OF_BROKER_ROOT = 2

# The packages of each room, the lowest layer first; "" is the room's own folder.  A package may
# import those of lower layers.  Its docstring names the ones that it does import.
LAYERS: dict[str, list[str]] = {
    "common": ["wire", "", "metric_table record settings tls", "protocol"],
    "broker": [
        "log filter",
        "index",
        "persistence",
        "store",
        "doctor meta ha",
        "deliveries timer transaction",
        "pop",
        "fifo operations",
        "lite diagnostics",
        "core",
        "handlers",
        "node",
        "",
    ],
    "proxy": [
        "api transport",
        "transport.lean rpc",
        "brokers",
        "auth",
        "messaging",
        "lanes",
        "admin remoting",
        "",
    ],
    "controller": [""],
    "operator": ["model", "kube resources", "reports", "cluster", "declared", ""],
    "reports": ["records jobs", "source", "", "output"],
    "cli": ["monitoring terminal", "", "load local roles"],
    "console": ["", "pages", "web"],
    "testing": [
        "disk oracle",
        "harness",
        "sim",
        "timer_world transaction_world cluster_world",
        "groups_world",
        "",
    ],
}

# Which rooms a room may import.  Processes meet on the wire, so nobody looks sideways.
EVERY_ROOM = set(LAYERS)
ROOM_MAY_IMPORT: dict[str, set[str]] = {
    "common": set(),
    **{room: {"common"} for room in ("broker", "proxy", "controller", "operator", "reports")},
    "cli": EVERY_ROOM,
    # It asks a proxy as the commands do, through their client.
    "console": {"common", "cli"},
    "testing": EVERY_ROOM,
}

# `python -m popmq`, the one module that lies in the namespace itself.
COMMAND_OF_THE_NAMESPACE = ROOT / "cli" / "popmq" / "__main__.py"

# A top-level package of the reports, because Spark finds a data source by such a name.
SPARK_SOURCE = "pyspark_popmq"

# Packages whose `__init__.py` holds more than a docstring, with the reason.
INITS_WITH_CODE = {
    "testing/popmq/testing/__init__.py",  # `from popmq.testing import broker` is a public promise
}
# Packages that are larger than MAX_MODULES, with the issue that makes them smaller.
LARGER_PACKAGES: set[str] = set()

# Files that decide and therefore may not wait, look at a clock or throw dice by themselves.
CORE_PLACES = (
    "broker/popmq/broker/log",
    "broker/popmq/broker/index",
    "broker/popmq/broker/persistence",
    "broker/popmq/broker/store",
    "broker/popmq/broker/doctor",
    "broker/popmq/broker/meta",
    "broker/popmq/broker/deliveries",
    "broker/popmq/broker/pop",
    "broker/popmq/broker/fifo",
    "broker/popmq/broker/lite",
    "broker/popmq/broker/operations",
    "broker/popmq/broker/diagnostics",
    "broker/popmq/broker/timer",
    "broker/popmq/broker/transaction",
    "broker/popmq/broker/filter",
    "broker/popmq/broker/ha",
    "controller/popmq/controller/controller.py",
    "controller/popmq/controller/election.py",
    "controller/popmq/controller/failover.py",
    "controller/popmq/controller/long_polls.py",
    "controller/popmq/controller/replica_group.py",
    "controller/popmq/controller/replicas.py",
    "controller/popmq/controller/routes.py",
    "operator/popmq/operator/model",
    "operator/popmq/operator/resources",
    "operator/popmq/operator/cluster/actions.py",
    "operator/popmq/operator/cluster/desired.py",
    "operator/popmq/operator/cluster/observed.py",
    "operator/popmq/operator/cluster/plan.py",
    "operator/popmq/operator/cluster/rollout.py",
    "operator/popmq/operator/cluster/status.py",
    "operator/popmq/operator/declared/declared_resources.py",
    "common/popmq/common/record/message.py",
    "common/popmq/common/record/receipt.py",
    "common/popmq/common/topics.py",
    "common/popmq/common/protocol/messaging_payloads.py",
)
# Paths in CORE_PLACES that are shells after all, one a line with the reason.
SHELLS_AMONG_CORES = frozenset(
    {
        # It writes the checkpoint on two threads, which take turns; it decides nothing by that.
        "broker/popmq/broker/persistence/checkpoint_scheduler.py",
        # Its lock lets the loop and the threads of the store share the files that are open.
        "broker/popmq/broker/log/open_files.py",
    }
)

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
    return sorted(folder.name for folder in folders if (folder / "popmq" / folder.name).is_dir())


def room_modules() -> list[Path]:
    modules = {path for room in rooms() for path in (ROOT / room / "popmq").rglob("*.py")}
    return sorted(modules - {COMMAND_OF_THE_NAMESPACE})


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
    """broker/popmq/broker/log/commit_log.py -> popmq.broker.log.commit_log"""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])


def parsed(path: Path) -> ast.Module:
    """Not kept: thousands of nodes would slow each garbage collection of the other tests."""
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


@cache
def packages() -> frozenset[str]:
    """popmq.broker, popmq.broker.log and so on."""
    named = {dotted(path).removesuffix(".__init__") for path in room_modules() if is_init(path)}
    return frozenset(name for name in named if name.startswith("popmq."))


def is_init(path: Path) -> bool:
    return path.stem == "__init__"


def package_of(name: str) -> str | None:
    """The package that a module, or a name in one, belongs to."""
    while name and name not in packages():
        name = name.rpartition(".")[0]
    return name or None


def layer_of(package: str) -> int:
    """Raises ValueError for a package that the table does not name."""
    _, room, *below = package.split(".")
    for number, layer in enumerate(LAYERS[room]):
        if ".".join(below) in (layer.split() or [""]):
            return number
    raise ValueError(f"{package} is missing in the table LAYERS")


@cache
def imports_in(path: Path) -> tuple[str, ...]:
    return tuple(imports_of(parsed(path), dotted(path)))


def imported_packages(names: Iterable[str], module: str) -> Iterator[tuple[str, str]]:
    """(package, imported name) of each import of popmq outside the module's own package."""
    own = package_of(module)
    for name in names:
        target = package_of(name)
        if target is not None and target != own:
            yield target, name


def forbidden_imports(names: Iterable[str], module: str) -> Iterator[str]:
    room, own = part_of(module, 1), package_of(module)
    assert room is not None
    for target, name in imported_packages(names, module):
        other = part_of(target, 1)
        assert other is not None
        if other != room:
            allowed = other in ROOM_MAY_IMPORT[room]
        else:
            # The data source's package stands outside of popmq and above all of the reports.
            allowed = own is None or layer_of(target) < layer_of(own)
        if not allowed:
            yield f"{module} imports {name}"


def named_in_docstring(package: str) -> set[str]:
    """The packages after "May import:", written out."""
    room = part_of(package, 1)
    path = ROOT / str(room) / Path(*package.split(".")) / "__init__.py"
    text = " ".join((ast.get_docstring(parsed(path)) or "").split())
    match = re.search(r"May import: ([^;]*)\.$", text)
    names = match[1].split(", ") if match else []
    names = [] if names == ["no other package of popmq"] else names
    return {name if name.startswith("popmq.") else f"popmq.{room}.{name}" for name in names}


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
    wrong = [
        w for path in room_modules() for w in forbidden_imports(imports_in(path), dotted(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_room_has_its_row_in_the_table_of_imports() -> None:
    assert set(rooms()) <= set(ROOM_MAY_IMPORT)


def test_every_package_has_its_place_in_the_table_of_layers() -> None:
    named = {
        ".".join(filter(None, ("popmq", room, name)))
        for room, layers in LAYERS.items()
        for layer in layers
        for name in layer.split() or [""]
    }
    assert named == packages()


def test_a_package_names_in_its_docstring_what_it_imports() -> None:
    """Another room by its name, a package of its own room without the room's."""
    wrong = []
    for package in sorted(packages()):
        if package == "popmq.testing":
            continue  # its docstring is for users
        used = set()
        for path in room_modules():
            if package_of(dotted(path)) == package:
                for target, _ in imported_packages(imports_in(path), dotted(path)):
                    same = part_of(target, 1) == part_of(package, 1)
                    used.add(target if same else f"popmq.{part_of(target, 1)}")
        if used != named_in_docstring(package):
            wrong.append(f"{package} imports {sorted(used)}")
    assert not wrong, "\n".join(wrong)


def test_packages_import_each_other_without_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in room_modules():
        module = dotted(path)
        if (own := package_of(module)) is not None:
            graph.setdefault(own, set()).update(
                t for t, _ in imported_packages(imports_in(path), module)
            )
    graphlib.TopologicalSorter(graph).prepare()


def test_no_package_is_too_large_to_hold() -> None:
    sizes: dict[str, int] = {}
    for path in room_modules():
        package = package_of(dotted(path))
        if package is not None and not is_init(path) and not is_generated(path):
            sizes[package] = sizes.get(package, 0) + 1
    limits = {"popmq.broker": MAX_MODULES_OF_BROKER_ROOT}
    larger = {name for name, size in sizes.items() if size > limits.get(name, MAX_MODULES)}
    assert larger == LARGER_PACKAGES


def test_inits_hold_docstrings_only() -> None:
    inits = [path for path in room_modules() if is_init(path) and SPARK_SOURCE not in path.parts]
    with_code = {shown(path) for path in inits if len(parsed(path).body) > 1}
    assert with_code == INITS_WITH_CODE


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
    loose = {path for room in rooms() for path in (ROOT / room / "popmq").glob("*.py")}
    assert loose == {COMMAND_OF_THE_NAMESPACE}


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

    def packages(*names: str) -> set[str]:
        return {re.split("[^A-Za-z0-9_]", item)[0] for name in names for item in extras[name]}

    own = re.search(r"popmq\[(.*)\]", extras["dev"][0])
    assert own is not None
    installed = packages(*own[1].split(","))
    hidden = sorted(packages("reports", "reports-java", "fuzz", "browser") - installed)
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
    run = run_program([sys.executable, "-c", code], cwd=ROOT)
    assert run.returncode == 0, run.stdout[-2000:]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("popmq.proxy.brokers.metadata_cache", "import popmq.broker.store"),
        ("popmq.proxy.brokers.metadata_cache", "from popmq import broker"),
        ("popmq.common.protocol.frames", "def later():\n    from popmq.cli import main"),
        ("popmq.broker.log.dispatch", "from popmq.broker.pop.long_polling import LongPolling"),
        ("popmq.broker.log.dispatch", "from ..pop import long_polling"),
        ("popmq.broker.store.__init__", "from .. import meta"),
        ("popmq.broker.pop.pop_service", "from popmq.broker.core import broker"),
        ("popmq.broker.filter.tag", "from popmq.broker.meta.registry import Registry"),
        ("popmq.broker.handlers.server", "import popmq.broker.node.broker_process"),
        (
            "popmq.broker.log.dispatch",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import popmq.broker.store",
        ),
    ],
)
def test_the_import_guard_bites(module: str, source: str) -> None:
    assert list(forbidden_imports(imports_of(ast.parse(source), module), module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("popmq.proxy.brokers.metadata_cache", "from popmq.common.errors import PopmqError"),
        ("popmq.testing.running_broker", "from popmq.broker.core.broker import Broker"),
        ("popmq.broker.pop.pop_service", "from popmq.broker.log.commit_log import CommitLog"),
        ("popmq.broker.pop.pop_service", "from . import pop_batch"),
        ("popmq.broker.pop.__init__", "from .pop_batch import Batch"),
        ("popmq.broker.node.broker_process", "from popmq.broker.handlers.server import serve"),
    ],
)
def test_the_import_guard_lets_the_allowed_pass(module: str, source: str) -> None:
    assert not list(forbidden_imports(imports_of(ast.parse(source), module), module))


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
