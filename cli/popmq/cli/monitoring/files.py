"""Every file that is made from the table of metrics, by its path from the root of the tree."""

from popmq.cli.monitoring.alert import rule_tests, rules
from popmq.cli.monitoring.alerts import ALERTS
from popmq.cli.monitoring.dashboard import to_json
from popmq.cli.monitoring.panels import DASHBOARDS
from popmq.common.metric_table import page

FOLDER = "monitoring"
CHART = "charts/popmq/monitoring"  # helm reads nothing that is outside of a chart
RULES = "alerts.yml"
RULE_TESTS = "alerts_test.yml"


def generated_files() -> dict[str, str]:
    shown = {f"dashboards/{one.name}.json": to_json(one) for one in DASHBOARDS}
    shown[RULES] = rules(ALERTS)
    return {
        page.PATH: page.page(),
        f"{FOLDER}/{RULE_TESTS}": rule_tests(ALERTS, RULES),
        **{f"{folder}/{name}": text for folder in (FOLDER, CHART) for name, text in shown.items()},
    }
