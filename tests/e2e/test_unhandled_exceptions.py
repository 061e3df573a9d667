"""An exception that nothing handles ends the process of every role, with a traceback in its log.

The failures are planted in real processes by `planted_failures/sitecustomize.py`.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from e2e.many import Many
from e2e.processes import Role, free_port, tail

pytestmark = pytest.mark.more

PLANTS = Path(__file__).parent / "planted_failures"
WITHIN_S = 20.0
ANY_ROLE = (
    "call_soon",
    "call_later",
    "call_soon_threadsafe",
    "socket callback",
    "signal handler",
    "task",
    "future",
    "thread",
)
OF_BROKER = (
    "step",
    "completion: flusher",
    "completion: housekeeper",
    "completion: reader",
    "work: flusher",
    "work: housekeeper",
    "work: reader",
)


# A process takes seconds; tests/common/test_unhandled.py has each kind of callback on a loop.
EVERY_DAY = ("call_soon", "signal handler", "task", "completion: flusher", "work: flusher")


def some_heavy(*failures: str) -> list[ParameterSet]:
    heavy = pytest.mark.heavy
    return [
        pytest.param(failure, marks=[] if failure in EVERY_DAY else [heavy]) for failure in failures
    ]


def planted(failure: str) -> dict[str, str]:
    return {
        "PLANTED_FAILURE": failure,
        "PYTHONPATH": str(PLANTS),
        "POPMQ_HTTP_LISTEN": "127.0.0.1:0",
    }


def role(name: str, folder: Path, failure: str) -> Role:
    settings = planted(failure)
    arguments = [name]
    match name:
        case "broker":
            settings |= {"POPMQ_BROKER_LISTEN": "127.0.0.1:0", "POPMQ_BROKER_DATA": f"{folder}/d"}
        case "proxy":
            settings |= {"POPMQ_PROXY_LISTEN": "127.0.0.1:0"}
        case "controller":
            settings |= {"POPMQ_CONTROLLER_LISTEN": "127.0.0.1:0"}
        case "up":
            arguments += ["--data", f"{folder}/d", "--port", str(free_port()), "--http-port", "0"]
    if name in ("broker", "proxy"):
        settings |= {"POPMQ_CONTROLLER_ADDRESSES": f"127.0.0.1:{free_port()}"}
    return Role(name, arguments, folder=folder, settings=settings)


def critical_lines(log: Path) -> list[str]:
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if json.loads(line)["level"] == "critical"]


def check_that_it_ends(failing: Role) -> None:
    os.kill(failing.pid, signal.SIGUSR1)
    try:
        code = failing.wait(WITHIN_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{failing.name} still runs {WITHIN_S:g} s after the failure")
    log = tail(failing.log)
    assert code == 1, log
    lines = critical_lines(failing.log)
    assert any("Traceback" in line and "a planted failure" in line for line in lines), log


@pytest.mark.parametrize("failure", some_heavy(*ANY_ROLE, *OF_BROKER))
def test_a_broker_ends_when_nothing_handles_an_exception(tmp_path: Path, failure: str) -> None:
    with role("broker", tmp_path, failure) as broker:
        check_that_it_ends(broker)


@pytest.mark.parametrize("failure", some_heavy("call_soon", "future", "step", "completion: reader"))
def test_popmq_up_ends_when_nothing_handles_an_exception(tmp_path: Path, failure: str) -> None:
    with role("up", tmp_path, failure) as up:
        check_that_it_ends(up)


@pytest.mark.parametrize("failure", some_heavy("signal handler", "call_later", "future", "thread"))
def test_a_proxy_ends_when_nothing_handles_an_exception(tmp_path: Path, failure: str) -> None:
    with role("proxy", tmp_path, failure) as proxy:
        check_that_it_ends(proxy)


@pytest.mark.parametrize("failure", some_heavy("call_soon", "future", "step"))
def test_a_controller_ends_when_nothing_handles_an_exception(tmp_path: Path, failure: str) -> None:
    with role("controller", tmp_path, failure) as controller:
        check_that_it_ends(controller)


@pytest.mark.parametrize("failure", some_heavy("task", "call_later"))
def test_an_operator_ends_when_nothing_handles_an_exception(tmp_path: Path, failure: str) -> None:
    pytest.importorskip("kopf")
    kubeconfig = tmp_path / "kubeconfig"
    context = {"cluster": "here", "user": "me"}
    server = f"http://127.0.0.1:{free_port()}"  # nothing listens: the operator waits for it
    kubeconfig.write_text(
        json.dumps(
            {
                "current-context": "here",
                "contexts": [{"name": "here", "context": context}],
                "clusters": [{"name": "here", "cluster": {"server": server}}],
                "users": [{"name": "me", "user": {}}],
            }
        )
    )
    settings = {**planted(failure), "POPMQ_OPERATOR_KUBECONFIG": str(kubeconfig)}
    with Role("operator", ["operator"], folder=tmp_path, settings=settings) as operator:
        check_that_it_ends(operator)


def until(met: Callable[[], bool], log: Path) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not met():
        assert time.monotonic() < deadline_s, tail(log)
        time.sleep(0.05)


def test_a_worker_that_fails_ends_and_its_parent_starts_another(tmp_path: Path) -> None:
    settings = {
        **planted("call_soon"),
        "POPMQ_PROXY_LISTEN": "127.0.0.1:0",
        "POPMQ_PROXY_WORKERS": "2",
        "POPMQ_CONTROLLER_ADDRESSES": f"127.0.0.1:{free_port()}",
    }
    with Role("proxy", ["proxy"], folder=tmp_path, settings=settings) as proxy:
        children = Path(f"/proc/{proxy.pid}/task/{proxy.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGUSR1)
        until(lambda: proxy.metric("popmq_proxy_worker_restarts_total") == 1, proxy.log)
        until(lambda: proxy.metric("popmq_proxy_workers") == 2, proxy.log)
        assert "a planted failure" in proxy.log.read_text()


@pytest.mark.heavy
def test_a_broker_that_fails_is_started_again_by_its_supervisor(tmp_path: Path) -> None:
    settings = planted("completion: flusher")
    with Many(tmp_path, "--groups", "2", settings=settings) as many:
        before = many.process("broker-a-0")["pid"]
        os.kill(before, signal.SIGUSR1)

        def runs_again() -> bool:
            now = many.process("broker-a-0")
            return bool(now["pid"] not in (0, before) and now["starts"] == 2)

        until(runs_again, many.log)
        assert '"exit_code": 1' in many.log.read_text()
