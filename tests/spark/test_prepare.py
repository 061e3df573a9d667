"""What `popmq report prepare` kept is what a session starts with."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]


def test_java_starts_with_the_classes_that_were_kept(spark: Any, kept_classes: Path) -> None:
    pid = spark._jvm.java.lang.ProcessHandle.current().pid()
    assert str(kept_classes) in Path(f"/proc/{pid}/maps").read_text()
