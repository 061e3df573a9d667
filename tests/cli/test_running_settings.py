"""`popmq config --endpoint`: what the running processes have, and where they differ."""

import json
from pathlib import Path

import pytest
from e2e.processes import Cluster

from popmq.cli.local.config import running_rows
from popmq.common.settings.settings import Settings
from popmq.common.settings.settings_reply import process_settings
from popmq.common.wire import admin_pb2 as admin


def told(role: str, **values: object) -> admin.ProcessSettings:
    process = process_settings(role, role, Settings())
    for key, value in values.items():
        process.values[key.replace("__", ".")] = json.dumps(value)
    return process


def test_a_setting_on_which_all_agree_is_one_row() -> None:
    rows = running_rows([told("proxy"), told("broker")])
    assert {row["process"] for row in rows} == {"all"}
    assert {row["default"] for row in rows} == {True}
    assert len(rows) == len(Settings().flat())


def test_a_setting_on_which_processes_differ_names_them() -> None:
    rows = running_rows([told("proxy"), told("broker", topic__auto_create=True)])
    differing = [row for row in rows if row["key"] == "topic.auto_create"]
    assert differing == [
        {
            "key": "topic.auto_create",
            "value": False,
            "process": "proxy proxy",
            "default": True,
        },
        {
            "key": "topic.auto_create",
            "value": True,
            "process": "broker broker",
            "default": False,
        },
    ]


def test_a_setting_that_only_a_newer_process_has_is_shown() -> None:
    rows = running_rows([told("proxy"), told("broker", pop__new_in_3="x")])
    assert rows[-1] == {"key": "pop.new_in_3", "value": "x", "process": "all", "default": False}


@pytest.mark.more
def test_every_process_of_a_cluster_tells_its_own_settings(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        endpoint = cluster.endpoints[0]
        lines = cluster.popmq("config", "--endpoint", endpoint, "-o", "jsonl").splitlines()
        rows = [json.loads(line) for line in lines]
        sizes = {r["value"]: r["process"] for r in rows if r["key"] == "store.segment_bytes"}
        assert set(sizes) == {64 << 20, 1 << 30}
        assert sizes[64 << 20] == "broker broker-a"
        assert f"proxy {endpoint}" in sizes[1 << 30]
        assert "controller 127.0.0.1:" in sizes[1 << 30]
