"""Connections of the commands' own client."""

import gc
import warnings

from popmq.cli.client import Client
from popmq.testing.running_broker import RunningBroker


def test_a_client_that_is_dropped_or_closed_during_a_call_leaves_no_connection_open(
    popmq_broker: RunningBroker,
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client = Client(popmq_broker.endpoint)
        assert client.topics(system=False) == []
        client.close()
        assert client.topics(system=False) == []  # what a call in another thread would do
        assert not any(client._idle.values())
        dropped = Client(popmq_broker.endpoint)
        assert dropped.topics(system=False) == []
        del client, dropped
        gc.collect()
    assert [warning for warning in caught if warning.category is ResourceWarning] == []
