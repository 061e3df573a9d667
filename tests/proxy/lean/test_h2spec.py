"""h2spec, the conformance tests of HTTP/2 and HPACK by others, against a real port (strict).

Every case has to pass; a deviation would be a line in DEVIATIONS with its reason.
"""

import asyncio
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from e2e.official_go import ROOT, go_program
from proxy.lean.peer import echo

from popmq.common.settings.settings import ProxySettings
from popmq.proxy.transport.interface import Method, MethodType
from popmq.proxy.transport.lean.self_signed import certificates_of
from popmq.proxy.transport.lean.server import LeanTransport

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

MODULE = ROOT / "tools" / "h2spec"
CASES = 146
# "section: case" -> why we do otherwise.
DEVIATIONS: dict[str, str] = {}


@pytest.fixture(scope="module")
def h2spec() -> Path:
    return go_program(MODULE, "github.com/summerwind/h2spec/cmd/h2spec", "h2spec")


async def judged(binary: Path, report: Path, *, over_tls: bool) -> tuple[int, set[str]]:
    """How many cases ran, and those that did not pass."""
    certificates = certificates_of(ProxySettings(), None)
    methods = [Method("/s/echo", MethodType.UNARY, start=echo)]
    transport = LeanTransport(methods, "127.0.0.1", 0, certificates=certificates)
    port = await transport.start()
    flags = ["--strict", "-o", "5", "-j", str(report), *(["-t", "-k"] if over_tls else [])]
    process = await asyncio.create_subprocess_exec(
        str(binary), "-h", "127.0.0.1", "-p", str(port), *flags, stdout=subprocess.DEVNULL
    )
    await process.wait()
    await transport.stop(0)
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = {
        f"{case.get('package')}: {case.get('classname')}"
        for case in cases
        if any(child.tag in ("failure", "error", "skipped") for child in case)
    }
    return len(cases), failed


@pytest.mark.parametrize("over_tls", [False, True], ids=["plain", "tls"])
def test_every_case_of_h2spec_passes(h2spec: Path, tmp_path: Path, over_tls: bool) -> None:
    judging: Coroutine[Any, Any, tuple[int, set[str]]]
    judging = judged(h2spec, tmp_path / "report.xml", over_tls=over_tls)
    cases, failed = asyncio.run(judging)
    assert failed == set(DEVIATIONS)
    assert cases == CASES
