"""Programs that tests run to their end."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_program(
    command: Sequence[str | Path] | str, *, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """With what it wrote, as text."""
    return subprocess.run(command, capture_output=True, text=True, check=check, **options)
