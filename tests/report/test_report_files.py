"""A report's tables as Parquet."""

from pathlib import Path

import pytest
from report.object_store import ObjectStore

from popmq.reports.output.files import save, write_parquet
from popmq.reports.report import Report, ReportTable

pytestmark = pytest.mark.heavy  # Arrow comes with the reports


def test_each_table_is_a_file_of_its_columns_and_rows(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    rows = [
        {"group": "good", "lag": 7, "eta_s": 1.5, "level": 0},
        {"group": "slow", "lag": 2**53 + 1, "eta_s": None, "level": 3},
    ]
    tables = (
        ReportTable("groups", "Consumer groups", ("group", "lag", "eta_s"), rows),
        ReportTable("dead_letters", "Dead letters", ("group", "dead_letters"), []),
    )
    report = Report("lag", "127.0.0.1:8081", made_ms=0, moments=(), tables=tables)
    groups, dead_letters = write_parquet(report, tmp_path / "new")
    assert [group.name for group in (groups, dead_letters)] == [
        "lag-groups.parquet",
        "lag-dead_letters.parquet",
    ]
    read = pq.read_table(groups)
    assert read.column_names == ["group", "lag", "eta_s"]
    assert read.to_pylist() == [{name: row[name] for name in read.column_names} for row in rows]
    assert pq.read_table(dead_letters).column_names == ["group", "dead_letters"]
    assert pq.read_table(dead_letters).num_rows == 0


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_pages_stay_in_a_folder_by_their_time_and_the_newest_by_name(
    scheme: str, tmp_path: Path
) -> None:
    place = f"{scheme}{tmp_path}/reports/hourly"
    table = ReportTable("topics", "How late, by topic", ("topic",), [])
    waiting = ReportTable("waiting", "Timers that wait", ("timers",), [])
    for made_ms in (1_700_000_000_000, 1_700_003_600_000):
        report = Report("delay", "127.0.0.1:8081", made_ms, (), (table, waiting))
        assert len(save(report, place)) == 4
    folder = tmp_path / "reports" / "hourly"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("delay-20231114T221320Z.html", "delay-20231114T221320Z.json"),
        *("delay-20231114T231320Z.html", "delay-20231114T231320Z.json"),
        *("delay.html", "delay.json"),
    ]
    newest = (folder / "delay.html").read_text(encoding="utf-8")
    assert newest == (folder / "delay-20231114T231320Z.html").read_text(encoding="utf-8")
    assert "2023-11-14 23:13:20" in newest


def test_pages_stay_in_an_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reporter")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    table = ReportTable("topics", "How late, by topic", ("topic",), [])
    waiting = ReportTable("waiting", "Timers that wait", ("timers",), [])
    report = Report("delay", "127.0.0.1:8081", 1_700_000_000_000, (), (table, waiting))
    with ObjectStore() as store:
        options = f"endpoint_override={store.address}&scheme=http&region=any"
        save(report, f"s3://bucket/reports/hourly?{options}")
    assert set(store.objects) == {
        f"/bucket/reports/hourly/{name}"
        for name in (
            *("delay.html", "delay-20231114T221320Z.html"),
            *("delay.json", "delay-20231114T221320Z.json"),
        )
    }
    page = store.objects["/bucket/reports/hourly/delay.html"].decode()
    assert page.startswith("<!doctype html>")
    assert page.endswith("</html>\n")
    assert store.users == {"reporter"}
