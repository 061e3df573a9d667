"""With POPMQ_COMPILED=1 a wheel holds the hot modules of the proxy compiled by mypyc as well.

    POPMQ_COMPILED=1 pip install .        (needs a C compiler and Python's headers)

The same source either way: without the variable, or in an editable install, nothing is compiled,
and a platform without the wheel runs the .py files that lie beside the compiled ones.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Measured: docs/benchmarks.md, "CPU per call of the proxy".  What a native class cannot be stays
# out: `metadata.py` has a subclass of bytes, the sockets have asyncio's classes.
LEAN = (
    "bounds",
    "connection",
    "frames",
    "headers",
    "huffman",
    "inbox",
    "lanes",
    "messages",
    "outbox",
    "replies",
    "stream",
    "connection_timeouts",
)
PROXY = (
    "brokers/metadata_cache",
    "brokers/request_batcher",
    "lanes/ack_lane",
    "lanes/call_lane",
    "lanes/ordinary_send",
    "lanes/send_lane",
    "messaging/ack",
    "messaging/delay",
    "messaging/placement",
    "messaging/receive",
    "messaging/send",
    "rpc/convert",
    "rpc/rpc",
    "rpc/validate",
    "rpc/wire_scan",
)
COMMON = ("loop_iteration", "protocol/messaging_payloads", "protocol/payload", "varint")
HOT = (
    *(f"popmq/proxy/transport/lean/{name}.py" for name in LEAN),
    *(f"popmq/proxy/{name}.py" for name in PROXY),
    *(f"popmq/common/{name}.py" for name in COMMON),
)
ROOMS = ("common", "proxy")
STAGE = "build/compiled"


def wanted() -> bool:
    return os.environ.get("POPMQ_COMPILED", "") not in ("", "0")


class CompiledBuild(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling calls it for every wheel."""

    def dependencies(self) -> list[str]:
        if not wanted():
            return []
        imported = ("hpack>=4.1,<5", "protobuf>=6.31.1", "crc32c>=2.7", "prometheus-client>=0.20")
        return ["mypy>=1.13", "setuptools>=75", "types-protobuf", *imported]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or not wanted():
            return
        built = compiled(Path(self.root))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update(built)


def compiled(root: Path) -> dict[str, str]:
    """Compile; returns each library's path, and where it belongs in the wheel."""
    stage = root / STAGE
    shutil.rmtree(stage, ignore_errors=True)
    for room in ROOMS:
        shutil.copytree(
            root / room / "popmq" / room,
            stage / "popmq" / room,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    command = [sys.executable, "-m", "mypyc", "--explicit-package-bases", *HOT]
    done = subprocess.run(command, cwd=stage, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"mypyc failed:\n{done.stdout[-4_000:]}{done.stderr[-4_000:]}")
    libraries = [*stage.glob("*__mypyc*.so"), *(stage / "popmq").rglob("*.so")]
    assert len(libraries) == len(HOT) + 1, f"mypyc made {len(libraries)} libraries"
    return {str(path): path.relative_to(stage).as_posix() for path in libraries}
