"""The settings that a client gets back on Telemetry: RocketMQ's numbers, and the group's.

Every client breaks without some of them: a producer needs an exponential back-off, a consumer a
back-off, a batch and a poll; the Node client reads an exponential back-off only, the Python
client a customised one only, in whole seconds (docs/concepts/proxy.md).
"""

from popmq.common.settings.settings import Settings
from popmq.common.topics import LITE_NAME_LIMIT, GroupType, SubscriptionGroup
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.rpc.convert import duration

PRODUCER_ATTEMPTS = 3
PRODUCER_FIRST_MS, PRODUCER_LAST_MS = 10, 1_000
MULTIPLIER = 2.0
STEPS_LIMIT = 64  # of an exponential back-off told as steps
LONG_POLL_MS = 20_000
LITE_CONSUMERS = (pb.ClientType.LITE_PUSH_CONSUMER, pb.ClientType.LITE_SIMPLE_CONSUMER)
SUBSCRIPTIONS_LIMIT = 1_000  # of one client
_AGENT_LIMIT = 256  # of the texts that a client tells about itself
_ENTRY_OVERHEAD = 8
MAX_DELAY = "timer.max_delay_ms"


def producer_settings(asked: pb.Settings, settings: Settings) -> pb.Settings:
    """What the client sent, with what the server decides."""
    answer = _echo(asked)
    answer.backoff_policy.CopyFrom(
        _exponential(PRODUCER_ATTEMPTS, PRODUCER_FIRST_MS, PRODUCER_LAST_MS)
    )
    answer.publishing.max_body_size = settings.message.max_body_bytes
    answer.publishing.validate_message_type = True
    # The protocol has no field for it; clients that do not know the name pass it by.
    answer.client_properties[MAX_DELAY] = str(settings.timer.max_delay_ms)
    return answer


def consumer_settings(
    asked: pb.Settings, group: SubscriptionGroup, settings: Settings
) -> pb.Settings:
    answer = _echo(asked)
    answer.backoff_policy.CopyFrom(_back_off(asked.user_agent.language, group))
    subscription = answer.subscription
    # A lite topic is in one line, which a client that works on several at once would break.
    subscription.fifo = group.type is GroupType.FIFO or asked.client_type in LITE_CONSUMERS
    subscription.receive_batch_size = settings.pop.max_batch
    subscription.long_polling_timeout.CopyFrom(duration(min(LONG_POLL_MS, settings.poll.max_ms)))
    subscription.lite_subscription_quota = settings.lite.max_client_subscriptions
    subscription.max_lite_topic_size = LITE_NAME_LIMIT
    return answer


def used_settings(asked: pb.Settings, most_bytes: int) -> bytes:
    """Settings with what is used later: the kind of client, its agent, its group, and as many of
    its subscriptions as fit."""
    agent = asked.user_agent
    used = pb.Settings(client_type=asked.client_type)
    used.user_agent.language = agent.language
    used.user_agent.version = agent.version[:_AGENT_LIMIT]
    used.user_agent.hostname = agent.hostname[:_AGENT_LIMIT]
    if asked.HasField("publishing"):
        used.publishing.SetInParent()
    if asked.HasField("subscription"):
        used.subscription.group.name = asked.subscription.group.name[:_AGENT_LIMIT]
        left = most_bytes - used.ByteSize() - _AGENT_LIMIT
        for entry in asked.subscription.subscriptions[:SUBSCRIPTIONS_LIMIT]:
            left -= entry.ByteSize() + _ENTRY_OVERHEAD
            if left < 0:
                break
            used.subscription.subscriptions.append(entry)
    return used.SerializeToString()


def unknown_group(name: str, settings: Settings, *, fifo: bool) -> SubscriptionGroup:
    """What a group that nobody made yet will be like; `fifo`: its first topic is FIFO."""
    kind = GroupType.FIFO if fifo else GroupType.NORMAL
    return SubscriptionGroup(0, name, kind, settings.group.max_attempts)


def _back_off(language: int, group: SubscriptionGroup) -> pb.RetryPolicy:
    """The group's back-off, without jitter, in the form that clients of this language read."""
    steps, exponential = group.back_off_ms, group.exponential
    if exponential is None and language == pb.Language.NODE_JS:
        return _exponential(group.max_attempts, steps[0], steps[-1])
    if exponential is not None and language != pb.Language.PYTHON:
        return _exponential(
            group.max_attempts,
            exponential.initial_ms,
            exponential.max_ms,
            exponential.multiplier_milli / 1000,
        )
    if exponential is not None:
        steps = exponential.whole_second_steps(min(group.max_attempts, STEPS_LIMIT))
    return pb.RetryPolicy(
        max_attempts=group.max_attempts,
        customized_backoff=pb.CustomizedBackoff(next=map(duration, steps)),
    )


def is_node(asked: pb.Settings) -> bool:
    return asked.user_agent.language == pb.Language.NODE_JS


def _echo(asked: pb.Settings) -> pb.Settings:
    answer = pb.Settings()
    answer.CopyFrom(asked)
    answer.metric.CopyFrom(pb.Metric(on=False))
    return answer


def _exponential(
    attempts: int, first_ms: int, last_ms: int, multiplier: float = MULTIPLIER
) -> pb.RetryPolicy:
    return pb.RetryPolicy(
        max_attempts=attempts,
        exponential_backoff=pb.ExponentialBackoff(
            initial=duration(first_ms), max=duration(last_ms), multiplier=multiplier
        ),
    )
