"""Diagnostics: builds what explains, counts and samples, and takes its steps."""

from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.deliveries.group_topic_counts import EndCounts
from popmq.broker.diagnostics.audit import Audit
from popmq.broker.diagnostics.explain import Explainer
from popmq.broker.diagnostics.head_times import HeadTimes
from popmq.broker.diagnostics.lag_monitor import LagMonitor
from popmq.broker.diagnostics.sampler import Sampler
from popmq.broker.meta.registry import Registry
from popmq.broker.pop.pop_service import PopService
from popmq.broker.store.lookup import Lookup
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.timers import Timers
from popmq.common.clock import Clock
from popmq.common.metric_table.verdicts import VerdictRules
from popmq.common.settings.settings import Settings


class Diagnostics:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        deliveries: Deliveries,
        pops: PopService,
        lookup: Lookup,
        timers: Timers,
        stored_by_topic: dict[str, int],
        settings: Settings,
        clock: Clock,
        ends: EndCounts,
    ) -> None:
        table = deliveries.table
        heads = self.head_times = HeadTimes(store, registry)
        self.lag_monitor = LagMonitor(
            store,
            registry,
            table,
            heads,
            clock,
            clock.boot_ms,
            ends,
            VerdictRules(settings.group.failing_percent, settings.group.failing_least),
        )
        self.audit = Audit(store, registry, table, clock.boot_ms)
        self.sampler = Sampler(
            store, registry, table, ends, timers, heads, stored_by_topic, settings.reports, clock
        )
        self.explainer = Explainer(store, registry, deliveries, lookup, pops.filters)

    def step(self) -> int:
        """Returns how much was done."""
        self.lag_monitor.step()
        self.audit.step()
        return self.sampler.step()
