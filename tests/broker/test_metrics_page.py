"""The page of metrics: how large it gets, and how long the loop makes it at a time."""

import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from popmq.broker.node.metrics import broker_metrics, broker_readings
from popmq.common.metric_table.row import OTHERS, PREFIX
from popmq.common.observability import MetricsRegistry, counters_collector
from popmq.common.quantities import MIB
from popmq.testing.harness.core_broker import CoreBroker

PAGE_S = 0.02


def registry_of(core: CoreBroker) -> MetricsRegistry:
    registry = MetricsRegistry()
    registry.register(counters_collector(PREFIX, lambda: broker_readings(core.broker)))
    return registry


@pytest.fixture(scope="module")
def two_thousand_groups() -> Iterator[CoreBroker]:
    core = CoreBroker()
    core.topic("orders")
    for number in range(2_000):
        core.group(f"a-new-group-{number:06}")
        core.receive("orders", f"a-new-group-{number:06}")
    for _ in range(10):
        core.send("orders", b"x")
    yield core
    core.stop()


def test_a_page_of_two_thousand_groups_names_the_busiest_five_hundred_and_sums_the_rest(
    two_thousand_groups: CoreBroker,
) -> None:
    lags = {
        metric.labels["group"]: metric.value
        for metric in broker_metrics(two_thousand_groups.broker)
        if metric.name == "consumer_lag_messages"
    }
    assert len(lags) == 501
    assert sum(lags.values()) == 2_000 * 10
    assert lags[OTHERS] == 1_500 * 10


@pytest.mark.parametrize("stopped", [True, False])
def test_a_declared_group_stays_on_the_page_beside_a_thousand_that_receives_made(
    stopped: bool,
) -> None:
    """Those have more to do, and none of them is served either."""
    core = CoreBroker()
    for topic in ("orders", "bills"):
        core.topic(topic, queues=1)
    core.group("declared")
    core.receive("bills", "declared")
    core.send("bills", b"x")
    core.send("bills", b"x")
    core.receive("bills", "declared", limit=1)
    for number in range(600):
        core.receive("orders", f"made-{number}")
    for _ in range(10):
        core.send("orders", b"x")
    if stopped:
        core.advance(120_000)
    registry_of(core)
    values = {
        (metric.name, metric.labels["group"]): metric.value
        for metric in broker_metrics(core.broker)
        if "group" in metric.labels and "topic" in metric.labels
    }
    assert values["consumer_ready_messages", "declared"] == (2 if stopped else 1)
    page = {metric.name: metric.value for metric in broker_metrics(core.broker)}
    assert page["consumer_pairs_summed"] == 101
    # An alert joins both by their labels.
    for _ in range(3):
        core.advance(10_000)
        list(broker_metrics(core.broker))
    for number in range(600):
        core.receive("orders", f"made-{number}")
    out = {
        metric.labels["group"]
        for metric in broker_metrics(core.broker)
        if metric.name == "group_messages_out"
    }
    assert len(out) == 501
    assert "declared" in out


def test_no_piece_of_the_page_takes_more_than_twenty_milliseconds_of_cpu(
    two_thousand_groups: CoreBroker,
) -> None:
    """The fastest of several runs of each piece: what else the machine does is not the page's."""
    registry = registry_of(two_thousand_groups)
    runs = [list(timed_pieces(registry)) for _ in range(5)]
    pieces = [min(took_s) for took_s in zip(*runs, strict=True)]
    print(f"{len(pieces)} pieces, {sum(pieces) * 1e3:.0f} ms, longest {max(pieces) * 1e3:.1f} ms")
    assert max(pieces) < PAGE_S


def timed_pieces(registry: MetricsRegistry) -> Iterator[float]:
    pieces = registry.page_pieces()
    while True:
        began_s = time.thread_time()
        if next(pieces, None) is None:
            return
        yield time.thread_time() - began_s


def test_a_page_with_the_longest_names_has_less_than_a_mebibyte() -> None:
    core = CoreBroker()
    for number in range(600):
        topic, group = f"{number:0127}", f"{number:0120}"
        core.topic(topic, queues=1)
        core.group(group)
        core.send(topic, b"x")
        (delivery,) = core.receive(topic, group)
        core.ack(topic, group, delivery.handle)
    for _ in range(3):  # the ages of messages are looked up once somebody has asked
        page = b"".join(registry_of(core).page_pieces())
        core.advance(10_000)
        core.run_steps()
    print(f"{len(page)} bytes")
    assert len(page) <= MIB
    assert list(text_string_to_metric_families(page.decode()))
