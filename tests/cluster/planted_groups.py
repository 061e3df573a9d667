"""Mistakes planted into the product for clusters of several broker groups.

The first five are the bugs of the correctness issue, each with its whole fix taken out: what the
master applies with a second reading of the clock, message groups that move with the known broker
groups, requests that name no incarnation, metadata that goes back, and skew that counts as
downtime. The others are of the same classes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from cluster.planted_cluster import PlantedCluster, skew_is_downtime

from popmq.broker.core.meta_copies import MetaCopies
from popmq.broker.deliveries import check_point_buffer
from popmq.broker.node.meta_follower import MetaFollower
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.lanes import send_lane
from popmq.proxy.messaging import send
from popmq.proxy.messaging.send import SendMessage

Patch = pytest.MonkeyPatch


def second_reading_of_the_clock(patch: Patch) -> None:
    """B1: a buffered check point is applied with a reading after the append."""
    append = check_point_buffer.append_revive

    def wrong(store: Any, record: Any) -> int:
        append(store, record)
        return int(store.log_ms())

    patch.setattr(check_point_buffer, "append_revive", wrong)


def keys_over_the_known_groups(patch: Patch) -> None:
    """B2: a message group is placed over the broker groups that the proxy knows at that moment."""
    places = SendMessage.places

    def wrong(self: SendMessage, topic: Any, group: str, brokers: Any) -> Any:
        return places(self, topic, "", brokers)

    patch.setattr(SendMessage, "places", wrong)


def requests_name_no_incarnation(patch: Patch) -> None:
    """B3: requests carry names and no numbers, copies come once a second, and a deletion is
    answered before they have come."""
    for module in (send, send_lane):
        if hasattr(module, "id_tail"):
            patch.setattr(module, "id_tail", lambda number: b"")

    def ids(self: MetadataCache, topic: str, group: str, then: Callable[[int, int], None]) -> None:
        then(0, 0)

    def at_once(
        self: MetaCopies, reply: Callable[[Sequence[str]], None], *, deletion: bool
    ) -> None:
        self._when_acks_confirmed(partial(reply, ()))

    patch.setattr(MetadataCache, "ids", ids)
    patch.setattr(MetadataCache, "known_group_id", lambda self, name: 0)
    patch.setattr(MetaCopies, "answer_in_order", at_once)
    patch.setattr(
        MetaCopies, "_park", lambda self, request, answer, number: self._answer(request, answer)
    )


def metadata_goes_back(patch: Patch) -> None:
    """B4: a follower copies every state that differs from its own, older ones too."""

    def wrong(self: MetaFollower, registry: Any, records: Any, epoch: int, version: int) -> None:
        known = registry.meta_state if registry.owner == self._owner else (-1, 0)
        state = (epoch or registry.owner_epoch, version)
        if state != known and records:
            self._plan(registry, records, *state)
            self._wake()

    hear = MetaFollower.hear

    def any_address(self: MetaFollower, owner: str, address: str, epoch: int = 0) -> None:
        self._address_epoch = 0
        hear(self, owner, address, epoch)

    patch.setattr(MetaFollower, "_hear_state", wrong)
    patch.setattr(MetaFollower, "hear", any_address)


PLANTED = [
    PlantedCluster("second reading of the clock", second_reading_of_the_clock, 300),
    PlantedCluster("keys over the known groups", keys_over_the_known_groups, 300),
    PlantedCluster("requests name no incarnation", requests_name_no_incarnation, 300),
    PlantedCluster("metadata goes back", metadata_goes_back, 300),
    PlantedCluster("skew is downtime", skew_is_downtime, 300),
]
