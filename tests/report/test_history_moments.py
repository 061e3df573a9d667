"""Moments of a history: reports over several tables see all of them as they were at one time."""

from pathlib import Path

from popmq.common.wire import report_pb2 as pb
from popmq.reports.history_progress import HistoryProgress


def at(broker: str, epoch: int, end_position: int, sample: int) -> pb.BrokerTables:
    return pb.BrokerTables(
        broker=broker, epoch=epoch, end_position=end_position, sample=sample, wall_ms=7, log_ms=8
    )


def test_the_shared_moment_is_the_earliest_of_the_tables(tmp_path: Path) -> None:
    moments = HistoryProgress.load(tmp_path)
    moments.add(["offsets", "timers"], [at("a", 1, 100, 5), at("b", 9, 70, 3)])
    moments.add(["timers"], [at("a", 2, 200, 1)])
    history_progress = HistoryProgress.load(tmp_path)
    assert [
        (moment.broker, moment.epoch, moment.sample)
        for moment in history_progress.shared(["timers"])
    ] == [
        ("a", 2, 1),
        ("b", 9, 3),
    ]
    shared = [
        (moment.broker, moment.epoch, moment.sample)
        for moment in history_progress.shared(["offsets", "timers"])
    ]
    assert shared == [("a", 1, 5), ("b", 9, 3)]


def test_a_broker_group_that_one_of_the_tables_lacks_has_no_shared_moment(tmp_path: Path) -> None:
    moments = HistoryProgress.load(tmp_path)
    moments.add(["offsets", "timers"], [at("a", 1, 100, 5)])
    moments.add(["timers"], [at("b", 1, 10, 1)])
    assert [moment.broker for moment in moments.shared(["offsets", "timers"])] == ["a"]
    assert moments.shared(["revive"]) == ()
    assert HistoryProgress.load(tmp_path / "nothing").shared(["offsets"]) == ()


def test_what_is_written_is_whole_or_as_it_was(tmp_path: Path) -> None:
    moments = HistoryProgress.load(tmp_path)
    moments.add(["revive"], [at("a", 1, 100, 0)])
    moments.add(["revive"], [at("a", 1, 150, 0)])
    assert [path.name for path in tmp_path.iterdir()] == ["moments.json"], "no temporary file stays"
    (moment,) = HistoryProgress.load(tmp_path).shared(["revive"])
    assert (moment.end_position, moment.wall_ms, moment.log_ms) == (150, 7, 8)
