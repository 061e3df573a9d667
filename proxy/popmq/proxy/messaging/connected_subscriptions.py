"""Subscribed: who consumes what, as the telemetry streams of this proxy say.

A client says its group and its subscriptions in its settings.  Other proxies have other clients:
what is told here is of this one's (docs/reference/protocol.md).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from popmq.common.address import host_of
from popmq.proxy.api import admin_pb2 as api
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.messaging.client_settings import LITE_CONSUMERS

CONSUMED_AS = {True: api.LITE_SELECTIVE, False: api.CLUSTERING}


class ClientSubscription(NamedTuple):
    """What one client said of one topic."""

    client: api.ClientInfo
    expression: pb.FilterExpression


class ConnectedClient(NamedTuple):
    """A client with a stream here: the settings that it sent, and its address."""

    client_id: str
    peer: str
    settings: pb.Settings


class ConnectedSubscriptions:
    def __init__(self, connected: Callable[[], Iterable[ConnectedClient]]) -> None:
        self._heard = connected

    def by_pair(
        self, group: str = "", topic: str = ""
    ) -> dict[tuple[str, str], list[ClientSubscription]]:
        """By group and topic; an empty name is any."""
        subscriptions: dict[tuple[str, str], list[ClientSubscription]] = {}
        for client in self._heard():
            subscription = client.settings.subscription
            name = subscription.group.name
            if not client.settings.HasField("subscription") or group not in ("", name):
                continue
            for entry in subscription.subscriptions:
                if topic in ("", entry.topic.name):
                    reported_subscription = ClientSubscription(_client(client), entry.expression)
                    subscriptions.setdefault((name, entry.topic.name), []).append(
                        reported_subscription
                    )
        return subscriptions

    def clients(self) -> tuple[int, int]:
        """How many produce, and how many consume."""
        kinds = {
            client.client_id: client.settings.WhichOneof("pub_sub") for client in self._heard()
        }
        produce = sum(kind == "publishing" for kind in kinds.values())
        return produce, len(kinds) - produce


def told_of(
    group: str, topic: str, subscriptions: Sequence[ClientSubscription]
) -> api.SubscriptionInfo:
    """Of clients that are connected; the newest expression counts where they differ."""
    last = subscriptions[-1]
    return api.SubscriptionInfo(
        group=pb.Resource(name=group),
        topic=pb.Resource(name=topic),
        expression=last.expression,
        online=True,
        message_model=last.client.message_model,
        subscription_consistency=all(
            subscription.expression == last.expression for subscription in subscriptions
        ),
    )


def _client(client: ConnectedClient) -> api.ClientInfo:
    agent = client.settings.user_agent
    names = {number: name for name, number in pb.Language.items()}
    return api.ClientInfo(
        client_id=client.client_id,
        version=agent.version,
        language=names.get(agent.language, str(agent.language)),
        hostname=agent.hostname,
        egress_ip=host_of(client.peer),
        message_model=CONSUMED_AS[client.settings.client_type in LITE_CONSUMERS],
    )
