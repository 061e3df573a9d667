"""PopServices: builds what receives, acks and revives."""

import random
from collections.abc import Callable

from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.meta.registry import Registry
from popmq.broker.pop.ack_service import AckService
from popmq.broker.pop.catch_up_throttle import CatchUpThrottle
from popmq.broker.pop.pop_rollback import PopRollback
from popmq.broker.pop.pop_service import PopService
from popmq.broker.pop.revive_service import ReviveService
from popmq.broker.store.message_store import MessageStore
from popmq.common.settings.settings import Settings


class PopServices:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        deliveries: Deliveries,
        settings: Settings,
        now_ms: Callable[[], int],
        rng: random.Random,
    ) -> None:
        limits, name = settings.pop, settings.broker.name
        self.catch_up = CatchUpThrottle(
            percent=limits.catch_up_percent,
            behind_bytes=limits.catch_up_behind_bytes,
            now_ms=now_ms,
        )
        self.service = PopService(
            store, registry, deliveries, self.catch_up, limits, broker=name, rng=rng
        )
        self.pop_rollback = PopRollback(deliveries.table)
        self.revive = ReviveService(store, registry, deliveries)
        self.acks = AckService(store, registry, deliveries, self.service, self.revive, broker=name)
