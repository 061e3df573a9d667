"""What several brokers say about one group, as one answer: its settings, and what is parked."""

from popmq.common.wire import admin_pb2

SHOWN_LIMIT = 1_000  # parked message groups


def join_group(found: admin_pb2.GroupReply, part: admin_pb2.GroupReply) -> None:
    """The settings are those of the first broker that answered: a change goes to all of them."""
    if not found.HasField("group"):
        found.group.CopyFrom(part.group)
    found.parked_keys += part.parked_keys
    parked = [*found.parked, *part.parked]
    parked.sort(key=lambda key: (-key.parked_ms, key.broker, key.topic, key.key, key.queue_id))
    del found.parked[:]
    found.parked.extend(parked[:SHOWN_LIMIT])


def join_unparked(found: bytes, part: bytes) -> bytes:
    """A message group is parked in each queue by itself, and queues are at several brokers."""
    reply = admin_pb2.UnparkReply.FromString(found)
    reply.messages += admin_pb2.UnparkReply.FromString(part).messages
    return reply.SerializeToString()
