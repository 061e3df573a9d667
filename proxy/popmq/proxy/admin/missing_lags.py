"""Lag over broker groups: what a group reads at one of them, it reads at all of them.

A broker tells of the topics that a group has read there.  Messages may wait at another one that the
group has not come to yet; that one is asked for the pair by name.
"""

from collections.abc import Sequence

from google.protobuf.message import Message

from popmq.common.wire import admin_pb2


def missing_lags(found: Message) -> Sequence[tuple[str, bytes]]:
    """(broker, request) for each broker that said nothing of a pair that another one told of."""
    assert isinstance(found, admin_pb2.LagReply), "the command is LAG"
    told: dict[str, set[tuple[str, str]]] = {one: set() for one in found.brokers}
    for lag in found.lags:
        told.setdefault(lag.broker, set()).add((lag.group, lag.topic))
    every = set().union(*told.values())
    asks = []
    for broker, pairs in sorted(told.items()):
        if missing := sorted(every - pairs):
            wanted = [admin_pb2.LagPair(group=group, topic=topic) for group, topic in missing]
            asks.append((broker, admin_pb2.LagRequest(pairs=wanted).SerializeToString()))
    return asks
