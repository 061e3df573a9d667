"""Every file that is made from the table of metrics, by its path from the root of the tree.

`python -m popmq.cli.monitoring.files` (make metrics) writes them.
"""

import sys
from pathlib import Path

from popmq.cli.monitoring.alert import all_alerts, rule_tests, rules
from popmq.cli.monitoring.dashboard import dashboards, to_json
from popmq.common.metric_table import page

FOLDER = "monitoring"
CHART = "charts/popmq/monitoring"  # helm reads nothing that is outside of a chart
RULES = "alerts.yml"
RULE_TESTS = "alerts_test.yml"


def generated_files() -> dict[str, str]:
    shown = {f"dashboards/{board.name}.json": to_json(board) for board in dashboards()}
    shown[RULES] = rules(all_alerts())
    return {
        page.PATH: page.page(),
        f"{FOLDER}/{RULE_TESTS}": rule_tests(all_alerts(), RULES),
        **{f"{folder}/{name}": text for folder in (FOLDER, CHART) for name, text in shown.items()},
    }


if __name__ == "__main__":
    for path, text in generated_files().items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
        sys.stdout.write(f"written: {path}\n")
