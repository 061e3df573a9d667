"""Where the packages and data of the peers are: outside of the repository.

    python -m bench fetch

installs them into `$POPMQ_BENCH_CACHE` (else ~/.cache/popmq-bench) by the package managers of the
machine: Debian's packages are unpacked there and not installed, RocketMQ's jars come by Maven, the
NATS server is built by Go (Debian's is older than `sync_interval: always`).
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers.peer import NotAvailable

ROCKETMQ = "5.5.0"
NATS = "v2.10.27"
DEBIAN = ("nghttp2-client", "redis-server", "rabbitmq-server")
LIBRARIES = "usr/lib/x86_64-linux-gnu"
FETCH_S = 900

POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>popmq.bench</groupId><artifactId>rocketmq</artifactId><version>1</version>
  <dependencies>{}</dependencies>
</project>
"""
DEPENDENCY = (
    "<dependency><groupId>org.apache.rocketmq</groupId>"
    "<artifactId>rocketmq-{}</artifactId><version>{}</version></dependency>"
)


def cache() -> Path:
    return Path(os.environ.get("POPMQ_BENCH_CACHE") or Path.home() / ".cache" / "popmq-bench")


def rocketmq_jars() -> Path:
    folder = cache() / "rocketmq" / "lib"
    if not (folder / f"rocketmq-proxy-{ROCKETMQ}.jar").exists():
        raise NotAvailable(f"RocketMQ {ROCKETMQ} is not there: `python -m bench fetch`")
    return folder


def debian_root() -> Path:
    return cache() / "root"


def debian_program(path: str) -> Path:
    """A program of the unpacked packages; needs `debian_env`."""
    program = debian_root() / path
    if not program.exists():
        raise NotAvailable(f"{program.name} is not there: `python -m bench fetch`")
    return program


def debian_env() -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(debian_root() / LIBRARIES)}


def nats_server() -> Path:
    program = cache() / "bin" / "nats-server"
    if not program.exists():
        raise NotAvailable("nats-server is not there: `python -m bench fetch`")
    return program


def fetch() -> int:
    """Each of them; what fails is said and does not keep the others from being fetched."""
    cache().mkdir(parents=True, exist_ok=True)
    requested: tuple[tuple[str, Callable[[], None]], ...] = (
        (f"RocketMQ {ROCKETMQ}", _fetch_rocketmq),
        (f"Debian's {', '.join(DEBIAN)}", _fetch_debian),
        (f"nats-server {NATS}", _fetch_nats),
    )
    failed = 0
    for what, get in requested:
        try:
            get()
            print(f"{what}: done")
        except (subprocess.SubprocessError, OSError) as error:
            failed += 1
            print(f"{what}: {error}", file=sys.stderr)
    return min(failed, 1)


def _fetch_rocketmq() -> None:
    folder = cache() / "rocketmq"
    folder.mkdir(exist_ok=True)
    parts = "".join(DEPENDENCY.format(part, ROCKETMQ) for part in ("namesrv", "broker", "proxy"))
    (folder / "pom.xml").write_text(POM.format(parts))
    goal = ("dependency:copy-dependencies", "-DincludeScope=runtime")
    _run(["mvn", "-q", "-B", *goal, f"-DoutputDirectory={folder / 'lib'}"], folder)


def _fetch_debian() -> None:
    archives = cache() / "debs"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    options = (f"Dir::Cache::archives={archives}", "APT::Sandbox::User=root")
    flags = [word for option in options for word in ("-o", option)]
    asked = ["--download-only", "--reinstall", "--no-install-recommends", "-y"]
    _run(["apt-get", "install", *asked, *flags, *DEBIAN], archives)
    debian_root().mkdir(exist_ok=True)
    for package in sorted(archives.glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(debian_root())], archives)


def _fetch_nats() -> None:
    env = {**os.environ, "GOBIN": str(cache() / "bin")}
    _run(["go", "install", f"github.com/nats-io/nats-server/v2@{NATS}"], cache(), env)


def _run(argv: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> None:
    if shutil.which(argv[0]) is None:
        raise OSError(f"{argv[0]} is not installed")
    done = subprocess.run(
        argv, cwd=folder, env=env, capture_output=True, text=True, timeout=FETCH_S, check=False
    )
    if done.returncode:
        raise OSError(f"{argv[0]} ended with {done.returncode}: {done.stderr[-500:]}")
