"""The oracle of the cluster: what it excuses, and that it excuses no more."""

import pytest

from popmq.testing.cluster_world.history import (
    ClusterReader,
    DeliveryHistory,
    Message,
    ReceiveRequestHistory,
)
from popmq.testing.cluster_world.oracle import ClusterOracle

INVISIBLE_MS = 6_000


class Push:
    """A push consumer that was given a message, and is given it again a second later."""

    def __init__(self) -> None:
        self.oracle = ClusterOracle()
        self.reader = ClusterReader("r", "t", 40, renewed=True)
        self.oracle.readers.append(self.reader)
        self.message = Message(0, "t", b"000000|", b"", 0, ok_at=1)
        self.oracle.messages.append(self.message)

    def given(self, attempt: int) -> None:
        oracle = self.oracle
        oracle.at += 1
        self.reader.open_pops += 1
        times = oracle.log_ms, INVISIBLE_MS
        ask = ReceiveRequestHistory(
            self.reader, INVISIBLE_MS, 0, oracle.at, oracle.now_ms, times[0], 0, True
        )
        held = DeliveryHistory(self.reader, self.message, attempt, b"", *times, oracle.at)
        oracle.popped(ask, [held])


@pytest.mark.parametrize("left", [True, False])
def test_only_after_a_good_bye_a_delivery_may_be_back_before_its_time(left: bool) -> None:
    push = Push()
    push.given(1)
    push.reader.left = left
    push.oracle.now_ms += 1_000
    push.given(2)
    assert [violation.invariant for violation in push.oracle.violations] == (
        [] if left else ["I3 no-early"]
    )


@pytest.mark.parametrize("blind", [True, False])
def test_a_master_that_knows_of_nothing_confirmed_may_renew_nothing(blind: bool) -> None:
    push = Push()
    push.oracle.now_ms = 1_000
    push.given(1)
    push.oracle.answered_ms = push.oracle.now_ms = 20_000
    push.oracle.client_heard(push.reader, push.oracle.log_ms)
    push.oracle.took_over(0, blind=blind)
    push.given(2)
    assert [violation.invariant for violation in push.oracle.violations] == (
        [] if blind else ["I3 no-early"]
    )
