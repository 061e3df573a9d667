"""A real Prometheus, from Debian's package, without installing it."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from e2e.processes import OwnProcess
from programs import run_program

PACKAGE = "prometheus"
START_S = 20.0
STOP_S = 10.0


def binaries() -> Path:
    """The folder of `prometheus` and `promtool`; the test is skipped when there is none.

    They are on PATH, or unpacked in the user's cache, or fetched there now.
    """
    if (result := shutil.which("prometheus")) and shutil.which("promtool"):
        return Path(result).parent
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "popmq" / PACKAGE
    folder = cache / "usr" / "bin"
    if not (folder / "promtool").exists():
        _fetch(cache)
    return folder


def _fetch(cache: Path) -> None:
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            pytest.skip(f"no prometheus on PATH, and no {tool} to fetch Debian's package with")
    cache.mkdir(parents=True, exist_ok=True)
    fetched = run_program(["apt-get", "download", PACKAGE], cwd=cache)
    packages = sorted(cache.glob(f"{PACKAGE}_*.deb"))
    if fetched.returncode or not packages:
        pytest.skip(f"apt-get download {PACKAGE} failed: {fetched.stderr.strip()[-300:]}")
    subprocess.run(["dpkg", "-x", str(packages[-1]), str(cache)], check=True, capture_output=True)
    for package in packages:
        package.unlink()


class Prometheus(OwnProcess):
    """Scrapes `targets` once a second as job popmq, and evaluates the rules of `rule_file`.

    With several sets of labels each target is scraped once with each: clusters of the same names.
    `others` are the scrape configurations of further jobs.
    """

    def __init__(
        self,
        folder: Path,
        targets: Sequence[str],
        rule_file: Path,
        *,
        labels: Sequence[Mapping[str, str]] = ({},),
        others: Sequence[Mapping[str, object]] = (),
    ) -> None:
        self._folder = folder / "prometheus"
        self._folder.mkdir()
        self._binary = binaries() / "prometheus"
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rule_file)],
            "scrape_configs": [
                {
                    "job_name": "popmq",
                    "static_configs": [
                        {"targets": list(targets), "labels": set_} for set_ in labels
                    ],
                },
                *others,
            ],
        }
        self._config = self._folder / "prometheus.yml"
        self._config.write_text(json.dumps(config))  # JSON is YAML

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            where = f"127.0.0.1:{probe.getsockname()[1]}"
        self._url = f"http://{where}"
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(self._binary),
                    f"--config.file={self._config}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={where}",
                ],
                stdout=log,
                stderr=log,
            )
        deadline_s = time.monotonic() + START_S
        while not self._is_ready():
            assert self._process.poll() is None, self._log()
            assert time.monotonic() < deadline_s, self._log()
            time.sleep(0.1)

    def end(self) -> None:
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(STOP_S) == 0, self._log()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an instant query finds now; AssertionError with Prometheus's word for a bad one."""
        results = self._get("query?" + urllib.parse.urlencode({"query": expression}))
        result: list[dict[str, Any]] = results["result"]
        return result

    def query_range(self, expression: str, *, seconds: int, step: int) -> list[dict[str, Any]]:
        """Its values of the last `seconds`, one each `step` seconds: a matrix."""
        now = time.time()
        results = self._get(
            "query_range?"
            + urllib.parse.urlencode(
                {"query": expression, "start": now - seconds, "end": now, "step": step}
            )
        )
        result: list[dict[str, Any]] = results["result"]
        return result

    def alerts(self) -> dict[str, dict[str, Any]]:
        """Every alert rule by its name: `health`, `state` and more."""
        groups = self._get("rules")["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def _get(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}", timeout=10) as reply:
                data: dict[str, Any] = json.load(reply)["data"]
                return data
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()}") from error

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def _log(self) -> str:
        return (self._folder / "prometheus.log").read_text(errors="replace")[-2_000:]
