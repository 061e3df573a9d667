"""Deliveries: builds the tables of what is delivered and not finished."""

from collections.abc import Callable

from popmq.broker.deliveries.check_point_buffer import CheckPointBuffer
from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.client_liveness import ClientLiveness, ClientNames
from popmq.broker.deliveries.described_clients import DescribedClients
from popmq.broker.deliveries.in_flight_bodies import InFlightBodies
from popmq.broker.deliveries.redriven_dead_letters import RedrivenDeadLetters
from popmq.broker.store.message_store import MessageStore
from popmq.common.settings.settings import PopSettings


class Deliveries:
    def __init__(
        self,
        store: MessageStore,
        settings: PopSettings,
        on_unblocked: Callable[[int, int, int], None],
    ) -> None:
        self.table = CheckPointTable(settings.revive_step_ms, on_unblocked)
        self.buffer = CheckPointBuffer(store, self.table, settings)
        self.bodies = InFlightBodies(store, self.table)
        self.redriven = RedrivenDeadLetters()
        self.liveness = ClientLiveness()
        self.clients = ClientNames()
        self.described = DescribedClients()
