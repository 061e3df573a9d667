"""No step of the background work grows with the number of queues and of groups that read them.

A place is a queue and a group that reads it.  Everything that looks at all places or queues
(samples, lags, checkpoints, snapshots, retention) does so in pieces, between which the loop serves.
"""

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest
from security.target import REFERENCE_S, reference_work

from popmq.common.settings.settings import StoreSettings
from popmq.testing.harness.core_broker import SMALL, CoreBroker

pytestmark = [pytest.mark.heavy, pytest.mark.alone]  # other work takes the processor's caches
TOPICS, QUEUES, GROUPS = 40, 50, 50
ROUNDS = 3  # retention keeps what the older of two snapshots needs
LONGEST_STEP_S = 0.02
STORE = StoreSettings(segment_bytes=1 << 20, snapshot_bytes=256 << 20, retention_bytes=1)


@pytest.fixture(scope="module")
def core() -> Iterator[CoreBroker]:
    core = CoreBroker(settings=replace(SMALL, store=STORE))
    groups = [f"group-{number}" for number in range(GROUPS)]
    for group in groups:
        core.group(group)
    for topic in (f"topic-{number}" for number in range(TOPICS)):
        core.topic(topic, queues=QUEUES)
        for queue_id in range(QUEUES):
            core.send(topic, b"x" * 1_000, queue_id=queue_id)
        for group in groups:
            while deliveries := core.receive(topic, group, invisible_ms=3_600_000):
                for delivery in deliveries[::2]:
                    core.ack(topic, group, delivery.handle)
        core.run_steps()
    assert len(core.broker.deliveries.table.places()) >= TOPICS * QUEUES * GROUPS
    gc.collect()
    gc.freeze()  # as a process does when it is ready
    gc.disable()
    yield core
    gc.enable()
    gc.unfreeze()


def longest_step_s(core: CoreBroker, least_steps: int) -> float:
    """Of the steps until nothing is left to do, at least so many."""
    longest_s = 0.0
    for number in count():
        began_s = time.thread_time()
        done = core.broker.step()
        longest_s = max(longest_s, time.thread_time() - began_s)
        core.run_until_idle()
        if not done and number >= least_steps:
            return longest_s
    raise AssertionError


def test_no_step_is_longer_than_twenty_milliseconds_at_a_hundred_thousand_places(
    core: CoreBroker,
) -> None:
    broker = core.broker
    store, sampler = broker.store, broker.diagnostics.sampler
    slowness = reference_work() / REFERENCE_S
    samples, checkpoints, snapshots = sampler.taken, store.checkpoints.made, store.snapshots.made
    rounds = defaultdict[str, list[float]](list)  # the longest step of each: noise only adds
    for number in range(1, ROUNDS + 1):
        core.clock.advance(31_000)
        rounds["sample and checkpoint"].append(longest_step_s(core, 10))
        assert sampler.taken >= samples + number
        assert store.checkpoints.made >= checkpoints + number
        broker.diagnostics.lag_monitor.on_scrape()
        broker.diagnostics.audit.on_scrape()
        core.clock.advance(5_000)
        rounds["lags and recount"].append(longest_step_s(core, 10_000))
        store.snapshots.wanted = True
        core.send("topic-0", b"x")
        core.clock.advance(11_000)
        rounds["snapshot"].append(longest_step_s(core, 1_000))
        assert store.snapshots.made >= snapshots + number
    longest_s = {what: statistics.median(several) for what, several in rounds.items()}
    core.clock.advance(120_000)
    longest_s["retention"] = longest_step_s(core, 1_000)
    assert store.retention.deleted_segments > 0
    slowness = max(1.0, slowness, reference_work() / REFERENCE_S)
    print({what: f"{1_000 * s:.1f} ms" for what, s in longest_s.items()}, f"slowness {slowness}")
    assert max(longest_s.values()) <= LONGEST_STEP_S * slowness
