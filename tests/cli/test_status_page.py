"""`popmq status`: what has to be looked at first, within a terminal of 80 columns and 24 lines."""

import pytest

from popmq.cli.status import ClusterView, status_lines
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import controller_pb2 as pb

NOW_MS = 1_700_000_000_000


def test_a_group_with_a_bad_verdict_is_named_although_its_messages_are_young() -> None:
    lags = [
        admin.Lag(group="flaky", topic="orders", ready=1, verdict="FAILING"),
        admin.Lag(group="idle", topic="a", oldest_ready_ms=NOW_MS - 600_000, verdict="STOPPED"),
        admin.Lag(group="fine", topic="a", verdict="OK"),
        admin.Lag(group="new", topic="a", verdict="UNKNOWN"),
    ]
    reply = admin.LagReply(lags=lags, now_ms=NOW_MS)
    view = ClusterView(pb.ListReplicasReply(), reply, admin.ForecastTimersReply(), [])
    assert view.notes == [
        "group idle is STOPPED: the oldest waiting message of a has waited for 10m",
        "group flaky is FAILING in topic orders",
    ]


def test_dead_letters_come_first_and_a_long_page_fits_a_small_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lags = [
        admin.Lag(
            group=f"group-with-a-rather-long-name-{number}",
            topic="topic-with-a-rather-long-name",
            ready=100 - number,
            oldest_ready_ms=NOW_MS - 600_000,
        )
        for number in range(9)
    ]
    lags.append(admin.Lag(group="flaky", topic="orders", ready=1))
    dead = [admin.DeadLetterCount(group="flaky", stored=3, redriven=1)]
    members = [
        pb.Member(broker=pb.BrokerAddress(broker="broker-a", node=f"broker-a-{number}"))
        for number in range(3)
    ]
    for member, role in zip(members, (pb.MASTER, pb.SLAVE, pb.SLAVE), strict=True):
        member.role, member.alive = role, True
    view = ClusterView(
        pb.ListReplicasReply(groups=[pb.GroupState(group="broker-a", members=members)]),
        admin.LagReply(lags=lags, dead_letters=dead, now_ms=NOW_MS),
        admin.ForecastTimersReply(),
        [],
    )
    lines = status_lines(view)
    assert lines[0] == "healthy, but have a look:"
    assert lines[1] == "  group flaky has 2 dead letters"
    (row,) = [line for line in lines if line.startswith("flaky")]
    assert row.split()[-1] == "2"
    assert "  and 7 more: `popmq lag` has all" in lines
    assert lines[-1] == "and 5 more: `popmq lag` has all"
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
