"""The Python of the how-to guides on migration runs as it stands there."""

import os
import re
import sys
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "docs" / "how-to").glob("migrate-*.md"))


@pytest.mark.more
def test_the_examples_of_the_migration_guides_run_as_they_stand_there(tmp_path: Path) -> None:
    tests = 0
    for guide in GUIDES:
        blocks = re.findall(
            r"^```python\n(.*?)^```", guide.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        source = "\n\n".join(blocks)
        tests += source.count("def test_")
        (tmp_path / f"test_{guide.stem.replace('-', '_')}.py").write_text(source)
    done = run_program(
        [sys.executable, "-m", "pytest", "-q", "."],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert tests >= 3
    assert f"{tests} passed" in done.stdout
