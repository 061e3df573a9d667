"""Topics and groups by the names that clients use, made where the settings allow it.

A topic whose messages have a fixed place (message groups, lite topics) always names the broker
groups that they are placed over: proxies must not depend on which groups they know at a moment.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from popmq.broker.meta.registry import Registry
from popmq.common import topics
from popmq.common.errors import Code, NotCopied, PopmqError, Refused
from popmq.common.settings.settings import Settings
from popmq.common.topics import GroupType, MessageType, SubscriptionGroup, TopicConfig

logger = logging.getLogger(__name__)

SAME_GROUPS_MS = 60_000
CHANGES_A_STEP = 128
WARNED_LIMIT = 10_000


class MetadataResolver:
    def __init__(self, registry: Registry, settings: Settings) -> None:
        self._registry = registry
        self._settings = settings
        # Broker groups that take messages now, as the controllers say; empty: none has said yet.
        self._cluster_groups: tuple[str, ...] = ()
        self._same_since_ms: int | None = None  # since when they have been the same
        self.used_groups: set[int] = set()  # of those that receives made, since the last look
        self._warned: set[tuple[int, int]] = set()  # ids of group and topic
        self._unplaced: deque[TopicConfig] | None = None  # not looked for yet

    @property
    def cluster_groups(self) -> Sequence[str]:
        return self._cluster_groups

    def set_cluster_groups(self, groups: Sequence[str], *, now_ms: int) -> None:
        """The broker groups that take messages now; a controller says so at every heartbeat."""
        if self._same_since_ms is None or tuple(groups) != self._cluster_groups:
            self._cluster_groups, self._same_since_ms = tuple(groups), now_ms

    def step(self, now_ms: int) -> int:
        """Write the groups of the cluster into topics that older brokers made without a list.

        Only once the controllers have named the same groups for a while: after a restart they know
        only those that have registered since.  Returns how many topics were looked at.
        """
        if self._unplaced is None:
            if not self._are_groups_settled(now_ms) or self._registry.owner:
                return 0
            # No topic is made without a list any more, so one look is enough.
            self._unplaced = deque(filter(self._is_unplaced, self._registry.topics()))
        done = 0
        while self._unplaced and done < CHANGES_A_STEP:
            self._place(self._unplaced.popleft().name)
            done += 1
        return done

    def _are_groups_settled(self, now_ms: int) -> bool:
        if self._same_since_ms is None or not self._cluster_groups:
            return False
        return now_ms - self._same_since_ms >= SAME_GROUPS_MS

    def _is_unplaced(self, topic: TopicConfig) -> bool:
        return (
            not topics.is_internal_topic(topic.name)
            and _has_fixed_places(topic)
            and not topic.brokers
        )

    def _place(self, name: str) -> None:
        topic = self._registry.find_topic(name)
        if topic is None or not self._is_unplaced(topic):
            return
        brokers = ", ".join(self._cluster_groups)
        try:
            self._registry.alter_topic(replace(topic, brokers=self._cluster_groups))
        except PopmqError as error:  # its other settings are not possible any more
            extra = {"topic": name, "brokers": brokers, "reason": str(error)}
            logger.error("a topic's broker groups cannot be written", extra=extra)
        else:
            extra = {"topic": name, "brokers": brokers}
            logger.info("a topic's broker groups are written", extra=extra)

    def topic(self, name: str, *, auto_create: bool = False, least_id: int = 0) -> TopicConfig:
        """The topic; made when the caller and the setting topic.auto_create both allow it.

        Raises NotCopied if the owner gave the name to a topic of `least_id`, and an older one is
        here.
        """
        topic = self._registry.find_topic(name)
        if topic is not None and not topics.is_internal_topic(name):
            if topic.id < least_id and self._registry.owner:
                self._registry.request_topic_copy(name)
                raise _not_copied("topic", name)
            return topic
        topics.check_readable_topic_name(name)
        if topic is None and self._registry.owner:
            if auto_create or least_id:  # else the owner would make it for a receive
                self._registry.request_topic_copy(name)
        elif topic is None and auto_create and self._settings.topic.auto_create:
            requested = TopicConfig(
                0,
                name,
                self._settings.topic.queues,
                MessageType[self._settings.topic.auto_create_type.upper()],
            )
            return self.create_topic(requested)
        return topic or self._registry.topic(name)

    def may_come(self, name: str) -> bool:
        """Whether a topic that does not exist may be made by what others do: its first send, or the
        first dead letter of a group."""
        if group := topics.group_of_dead_letters(name):
            return self._registry.find_group(group) is not None
        is_free = topics.is_new_name(name) and not topics.is_system_topic(name)
        return self._settings.topic.auto_create and is_free

    def create_topic(self, requested: TopicConfig) -> TopicConfig:
        """Over the broker groups of now, if message groups or lite topics are to stay where they
        are (D11); over this broker's own group while no controller has named any."""
        if _has_fixed_places(requested) and not requested.brokers:
            own = self._settings.broker.name
            requested = replace(requested, brokers=self._cluster_groups or (own,))
        return self._registry.create_topic(requested)

    def take_used_groups(self) -> set[int]:
        used, self.used_groups = self.used_groups, set()
        return used

    def check_group_copied(self, name: str, least_id: int) -> None:
        """Raise NotCopied if the owner gave the name to a group of `least_id`, and an older one is
        here."""
        group = self._registry.find_group(name)
        if group is not None and group.id < least_id and self._registry.owner:
            self._registry.request_group_copy(name)
            raise _not_copied("consumer group", name)

    def group(self, name: str, *, least_id: int = 0, fifo: bool = False) -> SubscriptionGroup:
        """The group; made with the defaults when group.auto_create allows it. Raises as `topic`.

        `fifo`: made for a FIFO topic, so that it keeps its order.
        """
        self.check_group_copied(name, least_id)
        group = self._registry.find_group(name)
        if group is not None:
            if group.auto_created:
                self.used_groups.add(group.id)
            return group
        topics.check_group_name(name)
        if self._registry.owner:
            self._registry.request_group_copy(name, fifo=fifo)
        elif self._settings.group.auto_create:
            return self._auto_create(name, GroupType.FIFO if fifo else GroupType.NORMAL)
        return self._registry.group(name)

    def group_of(self, topic: TopicConfig, name: str, *, least_id: int = 0) -> SubscriptionGroup:
        """The group, for a receive from that topic."""
        group = self.group(name, least_id=least_id, fifo=topic.type is MessageType.FIFO)
        if topics.loses_order(group, topic) and (group.id, topic.id) not in self._warned:
            if len(self._warned) >= WARNED_LIMIT:
                self._warned.clear()
            self._warned.add((group.id, topic.id))
            why = topics.unordered_text(name, [topic.name])
            extra = {"group": name, "topic": topic.name, "why": why}
            logger.warning("a group does not keep the order of a topic", extra=extra)
        return group

    def _auto_create(self, name: str, kind: GroupType) -> SubscriptionGroup:
        limit = self._settings.group.auto_created_limit
        if len(self._registry.auto_created) >= limit:
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"consumer group {name} does not exist, and receives have made {limit} groups "
                "already (group.auto_created_limit): create it with "
                f"`popmq group create {name}`, or delete some",
            )
        attempts = self._settings.group.max_attempts
        requested = SubscriptionGroup(0, name, kind, attempts, auto_created=True)
        return self._registry.create_group(requested)


def _has_fixed_places(topic: TopicConfig) -> bool:
    return topic.kind.has_lite_topics or topic.type.accepts(MessageType.FIFO)


def _not_copied(what: str, name: str) -> NotCopied:
    return NotCopied(
        f"{what} {name} was deleted and made again, and this broker group still has the old one"
    )
