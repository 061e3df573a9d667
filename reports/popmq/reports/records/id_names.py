"""Names: what stands behind the ids of one broker group's records."""

from dataclasses import dataclass, field

from popmq.common import topics
from popmq.common.wire import report_pb2 as pb


@dataclass(frozen=True, slots=True)
class IdNames:
    """An id that nobody knows any more, of a deleted topic for example, is shown as `#id`."""

    topics: dict[int, str] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)
    clients: dict[int, str] = field(default_factory=dict)

    @classmethod
    def from_wire(cls, names: pb.BrokerNames) -> "IdNames":
        return cls(
            {topic.id: topic.name for topic in names.topics},
            {group.id: group.name for group in names.groups},
            {client.id: client.name for client in names.clients},
        )

    def topic(self, number: int) -> str:
        return self.topics.get(number) or f"#{number}"

    def base_topic(self, number: int) -> str:
        """Of a retry or parking topic, the topic that it belongs to."""
        name = self.topic(number)
        return topics.split_group_topic(name)[1] if topics.is_group_owned(name) else name

    def is_retry(self, number: int) -> bool:
        return topics.is_retry_topic(self.topic(number))

    def group(self, number: int) -> str:
        return self.groups.get(number) or f"#{number}"

    def client(self, number: int) -> str:
        return self.clients.get(number) or f"#{number:016x}"
