"""Five consumers under traffic, and a pull consumer: the verdict of each, wherever it is told."""

from collections.abc import Callable

import pytest

from popmq.broker.node.metrics import broker_metrics
from popmq.common.metric_table.verdicts import Verdict
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.topics import GroupType, MessageType
from popmq.common.wire import admin_pb2 as pb
from popmq.common.wire.pull_pb2 import UpdateOffsetRequest
from popmq.testing.harness.core_broker import CoreBroker

SECOND_MS = 1_000
Consumer = Callable[[CoreBroker, int], None]


def healthy(core: CoreBroker, second: int) -> None:
    taken = core.receive("orders", "healthy", limit=32)
    core.ack("orders", "healthy", *(delivery.handle for delivery in taken))


def slow(core: CoreBroker, second: int) -> None:
    for delivery in core.receive("orders", "slow", limit=1):
        core.ack("orders", "slow", delivery.handle)


def stopped(core: CoreBroker, second: int) -> None:
    if second < 10:
        for delivery in core.receive("orders", "stopped", limit=32):
            core.ack("orders", "stopped", delivery.handle)


def failing(core: CoreBroker, second: int) -> None:
    for delivery in core.receive("orders", "failing", limit=32):
        core.reject("orders", "failing", delivery.handle)


def stuck(core: CoreBroker, second: int) -> None:
    """A consumer that hangs in one message of a key, and serves the other keys."""
    for delivery in core.receive("steps", "stuck", limit=32, invisible_ms=3_600_000):
        if not delivery.head.startswith(b"hangs"):
            core.ack("steps", "stuck", delivery.handle)


CONSUMERS: dict[str, Consumer] = {
    "healthy": healthy,
    "slow": slow,
    "stopped": stopped,
    "failing": failing,
    "stuck": stuck,
}
EXPECTED = {
    ("healthy", "orders"): "OK",
    ("slow", "orders"): "BEHIND",
    ("stopped", "orders"): "STOPPED",
    ("failing", "orders"): "FAILING",
    ("stuck", "steps"): "STUCK",
}


@pytest.fixture
def core() -> CoreBroker:
    core = CoreBroker()
    core.topic("orders", queues=1)
    core.topic("steps", queues=1, type=MessageType.FIFO)
    for name in CONSUMERS:
        kind = GroupType.FIFO if name == "stuck" else GroupType.NORMAL
        core.group(name, type=kind, max_attempts=3)
    return core


def run(core: CoreBroker, seconds: int) -> None:
    for second in range(seconds):
        for number in range(2):
            core.send("orders", b"%d" % number)
        core.send("steps", b"x", message_group=f"key-{second % 7}")
        if second < 3:
            core.send("steps", b"hangs", message_group="poison")
        for consume in CONSUMERS.values():
            consume(core, second)
        core.advance(SECOND_MS)


def commit(core: CoreBroker, group: str, offset: int) -> None:
    """As a pull consumer does that has worked off all messages below."""
    asked = UpdateOffsetRequest(topic="orders", group=group, queue_id=0, offset=offset)
    core.reply(Kind.UPDATE_OFFSET, asked.SerializeToString())


def lag_verdicts(core: CoreBroker) -> dict[tuple[str, str], str]:
    reply = pb.LagReply.FromString(core.reply(Kind.LAG, pb.LagRequest().SerializeToString()))
    return {(lag.group, lag.topic): lag.verdict for lag in reply.lags}


def metric_verdicts(core: CoreBroker) -> dict[tuple[str, str], str]:
    return {
        (metric.labels["group"], metric.labels["topic"]): Verdict(int(metric.value)).name
        for metric in broker_metrics(core.broker)
        if metric.name == "consumer_verdict"
    }


def test_the_verdicts_of_five_consumers_agree_and_are_right(core: CoreBroker) -> None:
    run(core, 400)
    print(lag_verdicts(core))
    assert lag_verdicts(core) == metric_verdicts(core) == EXPECTED


def test_dead_letters_are_failing_also_when_nothing_is_left_to_do(core: CoreBroker) -> None:
    for number in range(40):
        core.send("orders", b"%d" % number)
    core.advance(30_000)
    for _ in range(40):
        failing(core, 0)
        core.advance(1)
    core.advance(60_000)
    reply = pb.LagReply.FromString(core.reply(Kind.LAG, pb.LagRequest().SerializeToString()))
    (lag,) = [lag for lag in reply.lags if lag.group == "failing"]
    assert (lag.ready + lag.in_flight + lag.blocked, lag.verdict) == (0, "FAILING")
    for _ in range(12):
        core.advance(30_000)
    assert lag_verdicts(core)["failing", "orders"] == "OK"  # five minutes later


def test_pull_consumers_are_judged_by_their_offsets(core: CoreBroker) -> None:
    """They acknowledge nothing."""
    for name in ("pulls", "pulled", "lags"):
        core.group(name)
    for second in range(400):
        core.send("orders", b"x")
        commit(core, "pulls", second)
        if second < 60:
            commit(core, "pulled", second)
        commit(core, "lags", second // 2)
        core.advance(SECOND_MS)
    verdicts = {group: verdict for (group, _), verdict in lag_verdicts(core).items()}
    assert verdicts == {"pulls": "OK", "pulled": "STOPPED", "lags": "BEHIND"}
    assert metric_verdicts(core) == lag_verdicts(core)


def test_a_group_that_is_not_watched_for_long_is_unknown(core: CoreBroker) -> None:
    core.receive("orders", "stopped", limit=1)
    core.send("orders", b"x")
    core.advance(31_000)
    assert lag_verdicts(core)["stopped", "orders"] == "UNKNOWN"
