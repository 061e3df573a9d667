"""Parked message groups for administrators: what is parked, and what is to become of it."""

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.pop_check_point import UnparkAction
from popmq.common.errors import Code, Refused
from popmq.common.topics import SubscriptionGroup
from popmq.common.wire import admin_pb2 as pb

SHOWN_LIMIT = 1_000
_ACTIONS = {
    "resume": UnparkAction.RESUME,
    "skip": UnparkAction.SKIP,
    "dead-letter": UnparkAction.DEAD_LETTER,
}
_STATES = {
    None: "parked",
    UnparkAction.RESUME: "resumed",
    UnparkAction.DEAD_LETTER: "dead-lettering",
}


def add_parked(broker: Broker, group: SubscriptionGroup, reply: pb.GroupReply) -> None:
    """The group's parked keys, those parked for longest first."""
    keys = sorted(broker.table.parked.of_group(group.id), key=lambda key: key.since_ms)
    now_ms = broker.store.log_ms()
    reply.parked_keys = len(keys)
    for key in keys[:SHOWN_LIMIT]:
        topic = broker.registry.topic_by_id(key.topic_id)
        assert topic is not None, "a key parked of no topic"
        reply.parked.add(
            topic=topic.name,
            key=key.name.decode(errors="replace"),
            queue_id=key.queue_id,
            messages=len(key.messages),
            parked_ms=now_ms - key.since_ms,
            state=_STATES[key.state],
            broker=broker.settings.broker.name,
        )


def unpark(broker: Broker, body: bytes) -> bytes:
    request = pb.UnparkRequest.FromString(body)
    action = _ACTIONS.get(request.action)
    if action is None:
        known = ", ".join(_ACTIONS)
        raise Refused(
            Code.BAD_REQUEST, f"a parked message group takes {known}, not {request.action!r}"
        )
    group = broker.registry.group(request.group)
    topic = broker.directory.topic(request.topic)
    messages = broker.parking.apply_action(group, topic, request.key, action)
    status = pb.Status(code=Code.OK, message="OK")
    return pb.UnparkReply(status=status, messages=messages).SerializeToString()
