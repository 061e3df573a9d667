"""Directory: topics and groups by the names that clients use, made where the settings allow it."""

from dataclasses import replace

from popmq.broker.meta.registry import Registry
from popmq.common import topics
from popmq.common.config import Settings
from popmq.common.errors import NotCopied
from popmq.common.topics import MessageType, SubscriptionGroup, TopicConfig


class Directory:
    def __init__(self, registry: Registry, settings: Settings) -> None:
        self._registry = registry
        self._settings = settings
        # Broker groups that take messages now, as the controller says; empty: it has not said.
        self.cluster_groups: tuple[str, ...] = ()

    def topic(self, name: str, *, auto_create: bool = False, least_id: int = 0) -> TopicConfig:
        """The topic; made when the caller and the setting topic.auto_create both allow it.

        Raises NotCopied if the owner gave the name to a topic of `least_id`, and an older one is
        here.
        """
        found = self._registry.find_topic(name)
        if found is not None and name[0] != "%":
            if found.id < least_id and self._registry.owner:
                self._registry.want_topic(name)
                raise _not_copied("topic", name)
            return found
        topics.check_readable_topic_name(name)
        if found is None and self._registry.owner:
            self._registry.want_topic(name)
        elif found is None and auto_create and self._settings.topic.auto_create:
            wanted = TopicConfig(
                0,
                name,
                self._settings.topic.queues,
                MessageType[self._settings.topic.auto_create_type.upper()],
            )
            return self.create_topic(wanted)
        return found or self._registry.topic(name)

    def create_topic(self, wanted: TopicConfig) -> TopicConfig:
        """Over the broker groups of now, if message groups or lite topics are to stay where they
        are (D11)."""
        stays = wanted.type is MessageType.LITE or wanted.type.accepts(MessageType.FIFO)
        if stays and not wanted.brokers:
            wanted = replace(wanted, brokers=self.cluster_groups)
        return self._registry.create_topic(wanted)

    def check_group_copied(self, name: str, least_id: int) -> None:
        """Raise NotCopied if the owner gave the name to a group of `least_id`, and an older one is
        here."""
        found = self._registry.find_group(name)
        if found is not None and found.id < least_id and self._registry.owner:
            self._registry.want_group(name)
            raise _not_copied("consumer group", name)

    def group(self, name: str, *, least_id: int = 0) -> SubscriptionGroup:
        """The group; made with the defaults when group.auto_create allows it. Raises as `topic`."""
        self.check_group_copied(name, least_id)
        found = self._registry.find_group(name)
        if found is not None:
            return found
        topics.check_group_name(name)
        if self._registry.owner:
            self._registry.want_group(name)
        elif self._settings.group.auto_create:
            wanted = SubscriptionGroup(0, name, max_attempts=self._settings.group.max_attempts)
            return self._registry.create_group(wanted)
        return self._registry.group(name)


def _not_copied(what: str, name: str) -> NotCopied:
    return NotCopied(
        f"{what} {name} was deleted and made again, and this broker group still has the old one"
    )
