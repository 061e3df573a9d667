"""A disk without room and a process without descriptors, at each file operation of a cluster."""

import logging

import pytest
from sim_seeds import of_the_day

from popmq.broker.log.dispatch import Dispatch
from popmq.testing.cluster_world.shortages import ShortageTable

COUNT = 40
ALL = 10_000

pytestmark = pytest.mark.more


def test_no_broker_ends_whatever_file_operation_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.CRITICAL + 1, "popmq"):
        table = ShortageTable(of_the_day(1)[0])
        for shortage in table.choose(COUNT):
            table.try_one(shortage)
    print(table)
    assert not table.violations


def test_a_broker_that_ends_for_want_of_a_descriptor_is_seen(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.CRITICAL + 1, "popmq"):
        table = ShortageTable(1)
        places = [shortage.operation.place for shortage in table.choose(ALL)]
        at = next(at for at, place in enumerate(places) if "_queue_unless_short" in place)
        monkeypatch.setattr(Dispatch, "_queue_unless_short", Dispatch.queue)
        table.try_one(table.choose(ALL)[at])
    assert any("I0 broken" in violation for violation in table.violations)
