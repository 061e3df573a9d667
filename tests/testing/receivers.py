"""Receives that wait in a broker of this process, for tests that skip their time or cut them."""

import time
from concurrent.futures import Future
from typing import Any

from popmq.cli.client import Client
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.running_broker import RunningBroker


def wait_until_parked(b: RunningBroker, answer: "Future[Any]") -> None:
    """Return once the receive waits in the broker; an answer before that is a failure."""
    while not parked(b):
        assert not answer.done(), answer.result()
        time.sleep(0.001)  # another thread's call is on its way, and tells nobody


def broker_client(b: RunningBroker) -> Client:
    return Client(b.endpoint)


def queue_of(topic: str) -> api.MessageQueue:
    return api.MessageQueue(topic=api.Resource(name=topic), id=-1)


def parked(b: RunningBroker) -> int:
    return b._running().broker.broker.polling.count


def half_messages(b: RunningBroker) -> int:
    """Those that are neither committed nor rolled back."""
    return len(b._running().broker.broker.transactions.table.pending)
