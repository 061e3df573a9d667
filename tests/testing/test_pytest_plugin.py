"""The fixture that is there once popmq is installed, in a pytest run of its own."""

import os
import re
import sys
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).resolve().parents[2]
STRICT = ["-W", "error", "--strict-markers", "-p", "no:cacheprovider"]
# Not a plugin that a user needs to have; it warns where no loop scope is configured.
STRICT += ["-p", "no:asyncio"]


def pytest_run(folder: Path, source: str, *options: str) -> str:
    """Run the file by itself, with a home of its own; returns what pytest printed."""
    (folder / "test_mine.py").write_text(source)
    done = run_program(
        [sys.executable, "-m", "pytest", "-q", *STRICT, *options, "test_mine.py"],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python_blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def examples(page: str) -> list[str]:
    return [block for block in python_blocks(page) if "popmq_broker" in block]


def test_the_readme_s_example_runs_as_it_stands_there(tmp_path: Path) -> None:
    (example,) = examples("README.md")
    assert "1 passed" in pytest_run(tmp_path, example)


@pytest.mark.more
def test_the_example_of_the_page_on_containers_runs_as_it_stands_there(tmp_path: Path) -> None:
    (example,) = examples("docs/how-to/test-with-containers.md")
    assert "1 passed" in pytest_run(tmp_path, example)


@pytest.mark.more
def test_the_examples_of_the_page_on_testing_run_as_they_stand_there(tmp_path: Path) -> None:
    whole = "\n\n".join(python_blocks("docs/concepts/testing.md"))
    assert whole.count("def test_") >= 3
    assert f"{whole.count('def test_')} passed" in pytest_run(tmp_path, whole)


@pytest.mark.more
def test_the_example_of_the_page_on_the_simulator_runs_as_it_stands_there(tmp_path: Path) -> None:
    (example,) = python_blocks("docs/concepts/simulator.md")
    assert "1 passed" in pytest_run(tmp_path, example)


@pytest.mark.more
def test_the_marker_sets_the_options_of_the_broker(tmp_path: Path) -> None:
    source = """
import pytest

@pytest.mark.popmq(freeze=True, settings={"group.max_attempts": 1})
def test_marked(popmq_broker):
    before_ms = popmq_broker.now_ms()
    popmq_broker.send("orders", b"x")
    popmq_broker.receive("orders", "g")
    popmq_broker.advance("60s")
    assert popmq_broker.now_ms() == before_ms + 60_000
    assert len(popmq_broker.receive("%DLQ%g", "h")) == 1

def test_not_marked(popmq_broker):
    popmq_broker.send("orders", b"x")
    popmq_broker.receive("orders", "g")
    popmq_broker.advance("60s")
    assert popmq_broker.receive("orders", "g")[0].attempt == 2
"""
    assert "2 passed" in pytest_run(tmp_path, source)


def test_an_option_that_does_not_exist_is_an_error_that_names_it(tmp_path: Path) -> None:
    source = """
import pytest

@pytest.mark.popmq(frozen=True)
def test_marked(popmq_broker):
    pass
"""
    with pytest.raises(AssertionError, match="unexpected keyword argument 'frozen'"):
        pytest_run(tmp_path, source)


def test_a_run_that_does_not_use_it_does_not_load_it(tmp_path: Path) -> None:
    source = """
import sys

def test_nothing_was_imported():
    assert "popmq.testing.pytest_plugin" in sys.modules
    heavy = ("popmq.broker", "popmq.proxy", "popmq.common", "grpc", "google.protobuf")
    assert [name for name in sys.modules if name.startswith(heavy)] == []
"""
    assert "1 passed" in pytest_run(tmp_path, source)
