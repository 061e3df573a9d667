"""`python -m popmq.cli.monitoring` (make metrics): write every file that is made from the table."""

import sys
from pathlib import Path

from popmq.cli.monitoring.files import generated_files

for path, text in generated_files().items():
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")
    sys.stdout.write(f"written: {path}\n")
