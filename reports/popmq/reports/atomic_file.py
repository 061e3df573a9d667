"""A small JSON file that is as it was, or whole and new, whatever crashes."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Durable in content before it has its name."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}")
    with os.fdopen(handle, "w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    Path(name).rename(path)
