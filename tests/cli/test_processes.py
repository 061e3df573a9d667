"""`popmq` as a process of its own: its CPU time, Ctrl-C, pipes, and completion in a shell."""

import os
import pty
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.processes import role_environment
from programs import run_program

from popmq.cli.client import SILENT_S, CallFailed, Client
from popmq.testing.running_broker import RunningBroker

LOOKS = 25
RATIO_OF_VERSION, RATIO_OF_TOPIC_LIST = 6.0, 14.0


@pytest.fixture
def environ(popmq_broker: RunningBroker, tmp_path: Path) -> dict[str, str]:
    settings = {"POPMQ_ENDPOINT": popmq_broker.endpoint, "XDG_CONFIG_HOME": str(tmp_path)}
    environ = role_environment(settings)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled once, as when installed
    return environ


def popmq(*arguments: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run_program(
        [sys.executable, "-m", "popmq", *arguments], env=environ, stdin=subprocess.DEVNULL
    )


def cpu_s(command: list[str], environ: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


@pytest.mark.alone
def test_a_command_costs_little_more_cpu_than_python_itself(environ: dict[str, str]) -> None:
    python = sys.executable
    commands = {
        "pass": [python, "-c", "pass"],
        "version": [python, "-m", "popmq", "--version"],
        "topic list": [python, "-m", "popmq", "topic", "list"],
    }
    for command in commands.values():  # compiled, and in the cache of the disk
        subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True)
    took: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(LOOKS):  # in turns, so that all see the same machine
        for name, command in commands.items():
            took[name].append(cpu_s(command, environ))
    mean = {name: sum(seconds) / LOOKS for name, seconds in took.items()}
    ratios = {name: seconds / mean["pass"] for name, seconds in mean.items()}
    print(f"user CPU of python -c pass: {mean['pass'] * 1000:.1f} ms; ratios: {ratios}")
    assert ratios["version"] <= RATIO_OF_VERSION
    assert ratios["topic list"] <= RATIO_OF_TOPIC_LIST


def test_both_modules_are_the_command(environ: dict[str, str]) -> None:
    for module in ("popmq", "popmq.cli"):
        done = run_program([sys.executable, "-m", module, "topic", "list"], env=environ)
        assert (done.returncode, done.stdout, done.stderr) == (0, "no topic\n", "")


@pytest.fixture
def silent() -> Iterator[str]:
    """An address where connections are taken and nothing is answered."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.05, 0.1, 0.3])
def test_ctrl_c_ends_a_command_at_any_moment_without_a_traceback(
    silent: str, environ: dict[str, str], pause_s: float
) -> None:
    command = [sys.executable, "-m", "popmq", "topic", "list", "--endpoint", silent]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        _wait_until_it_imports(process)
        time.sleep(pause_s)  # so far into the imports, or into the command
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
    assert "Traceback" not in error
    assert process.returncode in (130, -signal.SIGINT)
    assert out == ""


def _wait_until_it_imports(process: "subprocess.Popen[str]") -> None:
    """Python starts with a handler of its own for SIGINT; `popmq` begins by removing it."""
    python_started = False
    while process.poll() is None:
        catches = _catches_sigint(process.pid)
        if python_started and not catches:
            return
        python_started = python_started or catches
    raise AssertionError("the command ended by itself")


def _catches_sigint(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) & 1 << signal.SIGINT - 1)


@pytest.mark.more
@pytest.mark.parametrize(
    "command", ["topic list", "explain 01AB", "message show 01AB", "dlq list g", "keys list"]
)
def test_a_silent_server_costs_a_look_at_most_three_seconds(
    silent: str, environ: dict[str, str], command: str
) -> None:
    done = popmq(*command.split(), "--endpoint", silent, environ=environ)
    assert done.returncode == 3
    assert done.stderr == f"popmq: {silent} did not answer within 2.5 s\n"


@pytest.mark.more
def test_a_silent_server_leaves_a_change_unclear_within_three_seconds(
    silent: str, environ: dict[str, str]
) -> None:
    done = popmq("keys", "rotate", "--endpoint", silent, environ=environ)
    assert done.returncode == 3
    text = f"{silent} did not answer within 2.5 s; whether it was done is unknown"
    assert done.stderr == f"popmq: {text}\n"


@pytest.mark.more
def test_looks_after_a_silence_have_little_time_until_a_pause(silent: str) -> None:
    def failed(client: Client) -> str:
        with pytest.raises(CallFailed) as caught:
            client.topics(system=False)
        return str(caught.value)

    with Client(silent, quick_timeout_ms=1_200) as client:
        assert failed(client) == f"{silent} did not answer within 1.2 s"
        assert failed(client) == f"{silent} did not answer within 0.2 s"
        client._looked_s -= 2 * SILENT_S  # as after a pause
        assert failed(client) == f"{silent} did not answer within 1.2 s"


def test_a_reader_that_has_enough_gets_no_error(environ: dict[str, str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    process = subprocess.Popen(
        [sys.executable, "-m", "popmq", "config"],
        env=environ,
        stdout=writes,
        stderr=subprocess.PIPE,
    )
    os.close(writes)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 141  # as of a program that SIGPIPE ended
    assert printed == b""


@pytest.mark.parametrize(
    "line", ["recv orders --group billing --ack", "send orders x", "status", "topic list", "--help"]
)
def test_a_command_whose_output_is_closed_does_nothing_and_says_so(
    line: str, popmq_broker: RunningBroker, environ: dict[str, str]
) -> None:
    popmq_broker.send("orders", b"kept")
    done = subprocess.run(
        [f"{sys.executable} -m popmq {line} >&-"],
        shell=True,
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("popmq: standard output is closed: nothing was done")
    assert [message.body for message in popmq_broker.receive("orders", "billing")] == [b"kept"]


def test_a_command_whose_input_is_closed_has_no_input(environ: dict[str, str]) -> None:
    done = run_program(
        [f"{sys.executable} -m popmq send orders --stdin-lines <&-"], shell=True, env=environ
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_lines_before_an_empty_one_are_sent_and_it_is_named(
    popmq_broker: RunningBroker, environ: dict[str, str]
) -> None:
    done = run_program(
        [sys.executable, "-m", "popmq", "send", "lines", "--stdin-lines", "--batch", "10"],
        env=environ,
        input="a\nb\n\nc\n",
    )
    assert done.returncode == 1
    assert "line 3 is empty" in done.stderr
    bodies = {message.body for message in popmq_broker.receive("lines", "readers")}
    assert bodies == {b"a", b"b"}


@pytest.mark.more
def test_up_prints_at_most_three_lines_on_a_terminal(
    environ: dict[str, str], tmp_path: Path
) -> None:
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 80))
    process = subprocess.Popen(
        [sys.executable, "-m", "popmq", "up", "--port", "0", "--http-port", "0"],
        env=environ,
        cwd=tmp_path,
        stdout=its,
        stderr=its,
    )
    os.close(its)
    try:
        printed = b""
        while b"popmq send hello" not in printed:
            printed += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    lines = printed.decode().splitlines()
    assert len(lines) <= 3, lines
    assert max(map(len, lines)) <= 80, lines
    ready = " ".join(line.strip() for line in lines[:-1])
    endpoint = re.fullmatch(r"ready: endpoint (\S+), metrics http://\S+, data \S+", ready)
    assert endpoint is not None
    assert lines[-1] == f"next: popmq send hello 'first message' --endpoint {endpoint[1]}"


SHELLS = {
    # What a completion of the line prints, when the shell does it by itself.
    "bash": """
        source <(popmq completion bash)
        complete_line() {{
            COMP_WORDS=($1); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
            _popmq_completion popmq; printf '%s\\n' "${{COMPREPLY[@]}}"
        }}
        complete_line "{line}"
    """,
    "fish": "popmq completion fish | source; complete --do-complete '{line}'",
    "zsh": """
        autoload -U compinit; compinit -u; compdef() {{ :; }}
        source <(popmq completion zsh)
        compadd() {{ print -l -- $completions; }}
        _describe() {{ print -l -- $completions_with_descriptions; }}
        words=({line}); CURRENT=$#words
        _popmq_completion
    """,
}


@pytest.mark.more
@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_a_shell_completes_commands_options_and_names(
    shell: str, popmq_broker: RunningBroker, environ: dict[str, str], tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        _install(shell)
    command = tmp_path / "popmq"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m popmq "$@"\n')
    command.chmod(0o755)
    popmq_broker.send("orders", b"x")
    popmq_broker.send("others", b"x")
    popmq_broker.receive("orders", "billing")
    path = f"{tmp_path}{os.pathsep}{environ['PATH']}"
    for line, wanted in (
        ("popmq top", {"topic", "top"}),
        ("popmq topic cr", {"create"}),
        ("popmq topic create x --perm", {"--permission"}),
        ("popmq topic show or", {"orders"}),
        ("popmq recv o", {"orders", "others"}),
        ("popmq group show b", {"billing"}),
    ):
        done = run_program(
            [shell, "-c", SHELLS[shell].format(line=line)],
            env={**environ, "PATH": path, "HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
        )
        words = {word.split("\t")[0].split(":")[0] for word in done.stdout.split("\n")}
        assert wanted <= words, f"{line}: {done.stdout}{done.stderr}"


def _install(shell: str) -> None:
    """As root, where the distribution has it; a machine without the shell fails the test."""
    for command in (
        ["apt-get", "update", "-q"],
        ["apt-get", "install", "-qy", "-o", "DPkg::Lock::Timeout=60", shell],
    ):
        subprocess.run(command, check=True, capture_output=True)
