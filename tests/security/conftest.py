"""A cluster whose callers must be users, on each transport."""

from collections.abc import Iterator

import pytest
from security.callers import Cluster

from popmq.common.wire import admin_pb2 as own
from popmq.proxy.auth.sealing import make_key_file
from popmq.testing.running_broker import RunningBroker


@pytest.fixture(scope="module", params=["lean", "grpcio"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("users")
    make_key_file(str(folder / "auth.key"))
    settings = {
        "proxy.transport": request.param,
        "auth.key_file": str(folder / "auth.key"),
        "auth.admin_file": str(folder / "admin.json"),
        "auth.failure_wait_ms": 0,  # one address is every stranger here
        "proxy.admin_on_public": True,
    }
    with RunningBroker(settings=settings) as broker:
        cluster = Cluster(broker, folder)
        cluster.client.topic(own.CreateTopicRequest(topic=own.Topic(name="orders")))
        cluster.client.group(own.CreateGroupRequest(group=own.Group(name="billing")))
        cluster.client.topic(own.CreateTopicRequest(topic=own.Topic(name="polls")))
        cluster.client.group(own.CreateGroupRequest(group=own.Group(name="pollers")))
        yield cluster
        cluster.close()
