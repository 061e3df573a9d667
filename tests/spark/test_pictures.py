"""The report's page in a real browser, and the pictures that the documentation shows.

`POPMQ_PICTURES=docs/pictures make test-long ARGS='tests/spark/test_pictures.py'` writes them anew.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.many import Many
from e2e.panels import CHOSEN, MONITORING, concrete
from e2e.prometheus import Prometheus
from e2e.watched_load import Load, create
from programs import run_program
from spark.browser import Browser
from spark.dashboard_page import dashboard_page

from popmq.cli.client import Client

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LOADED_S = float(os.environ.get("POPMQ_PICTURES_SECONDS", "60"))
PHONE, DESK = 390, 1_280


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they are written; without the variable they go with the test's other files."""
    asked = os.environ.get("POPMQ_PICTURES")
    folder = Path(asked) if asked else tmp_path_factory.mktemp("pictures")
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Many, Prometheus]]:
    """A cluster that was loaded for a while and still is."""
    folder = tmp_path_factory.mktemp("watched")
    often = {"POPMQ_REPORTS_SAMPLE_INTERVAL_MS": "2000"}
    with Many(folder, "--groups", "2", "--replicas", "2", settings=often) as many:
        targets = [process["listens"]["http.listen"] for process in many.state["processes"]]
        with (
            Prometheus(folder, targets, MONITORING / "alerts.yml", labels=[CHOSEN]) as prometheus,
            Client(many.ready.endpoint) as client,
        ):
            create(client)
            with Load(many.ready.endpoint) as load:
                time.sleep(LOADED_S)
                yield many, prometheus
            assert load.failures == []


def report(endpoint: str, *arguments: str) -> None:
    """Spark starts beside a load here, which takes longer than other commands may."""
    command = [sys.executable, "-m", "popmq.cli", "report", *arguments, "--endpoint", endpoint]
    done = run_program(command, timeout=200)
    assert done.returncode == 0, done.stderr[-2_000:]


def test_the_report_page_fits_desk_and_phone_in_light_and_dark(
    watched: tuple[Many, Prometheus], tmp_path: Path, pictures: Path
) -> None:
    page = tmp_path / "lag.html"
    report(watched[0].ready.endpoint, "lag", "--window", "1m", "--html", str(page))
    browser = Browser(tmp_path)
    light, dark = browser.look(page, wide=DESK), browser.look(page, wide=DESK, dark=True)
    phone = browser.look(page, wide=PHONE)
    assert (phone.wide, phone.overflow, light.overflow) == (PHONE, 0, 0)
    assert (light.scrolled, light.outside) == (0, 0)
    assert light.background != dark.background
    assert light.colour != dark.colour


@pytest.mark.parametrize("name", ["overview", "lag", "timers"])
def test_a_dashboard_is_drawn_from_its_own_queries(
    name: str, watched: tuple[Many, Prometheus], tmp_path: Path, pictures: Path
) -> None:
    path = MONITORING / "dashboards" / f"{name}.json"
    text, empty = dashboard_page(path, watched[1], concrete, seconds=int(LOADED_S))
    assert empty == []
    page = tmp_path / "dashboard.html"
    page.write_text(text, encoding="utf-8")
    browser = Browser(tmp_path)
    high = browser.look(page, wide=1_600).high
    browser.picture(page, pictures / f"dashboard-{name}.png", wide=1_600, high=high)
