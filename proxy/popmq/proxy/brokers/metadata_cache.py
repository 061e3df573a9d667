"""What brokers say about topics and groups, remembered for a second.

The broker group that owns them is asked, or, while it is away, one that has copies.  Dead-letter
topics are each broker group's own, so that all are asked until one has it.  Many calls that miss
the same name at once make one question.  A description that is older than the one before it,
because a follower or a deposed master gave it, replaces nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from popmq.common.clock import Clock
from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import TopicSettings
from popmq.common.topics import (
    MessageType,
    SubscriptionGroup,
    TopicConfig,
    group_of_dead_letters,
    is_internal_topic,
    is_new_name,
)
from popmq.common.wire import admin_pb2
from popmq.proxy.brokers.broker_ports import BrokerPorts, owner_first
from popmq.proxy.rpc.convert import group_of, topic_of

TTL_MS = 1_000
# A description of an older state than the remembered one is believed after so long without a newer
# one: the owner's data was restored from a backup, or begun again.
NEWER_STATE_MS = 10_000
MAX_REMEMBERED = 10_000
DESCRIBE_TIMEOUT_MS = 2_000
_AWAY = (Code.HA_NOT_AVAILABLE, Code.PROXY_TIMEOUT)
_NOT_FOUND = (Code.TOPIC_NOT_FOUND, Code.CONSUMER_GROUP_NOT_FOUND)
PATIENCE_MS = 1_000  # with one broker group, while there is another to ask

T = TypeVar("T")
OnResult = Callable[[T | PopmqError], None]
OnBytes = Callable[[bytes | PopmqError], None]


class _Described(NamedTuple, Generic[T]):
    """A topic or a group, and of which state of the owner's: the higher (epoch, version) is newer.
    A broker of a version without it says (0, 0)."""

    value: T
    state: tuple[int, int]


class MetadataCache:
    """Topics and groups by name. Results may come before the call returns."""

    def __init__(self, brokers: BrokerPorts, clock: Clock, settings: TopicSettings) -> None:
        self._brokers = brokers
        self._settings = settings
        self._topics: _Remembered[TopicConfig] = _Remembered(self._ask_topic, self._now_ms)
        self._groups: _Remembered[SubscriptionGroup] = _Remembered(self._ask_group, self._now_ms)
        self._clock = clock

    def topic(self, name: str, on_result: OnResult[TopicConfig]) -> None:
        """TOPIC_NOT_FOUND when there is none."""
        self._topics.get(name, on_result)

    def topic_of_send(self, name: str, on_result: OnResult[TopicConfig]) -> None:
        """As `topic`, but one that does not exist is made if topic.auto_create allows it."""

        def looked(result: TopicConfig | PopmqError) -> None:
            if self._settings.auto_create and _is_absent(result):
                request = admin_pb2.DescribeTopicRequest(name=name, auto_create=True)
                then = partial(_decoded, topic_of, on_result)
                ask_any(self._brokers, Kind.DESCRIBE_TOPIC, request.SerializeToString(), then)
            else:
                on_result(result)

        self._topics.get(name, looked)

    def topic_of_receive(self, name: str, on_result: OnResult[TopicConfig]) -> None:
        """As `topic`; of one that does not exist, and may come, what it would be, with id 0."""

        def looked(result: TopicConfig | PopmqError) -> None:
            if not _is_absent(result):
                on_result(result)
            elif group := group_of_dead_letters(name):
                self.group(group, partial(group_known, result))
            elif self._settings.auto_create and is_new_name(name):
                kind = MessageType[self._settings.auto_create_type.upper()]
                on_result(TopicConfig(0, name, self._settings.queues, kind))
            else:
                on_result(result)

        def group_known(
            absent: TopicConfig | PopmqError, group: SubscriptionGroup | PopmqError
        ) -> None:
            is_there = isinstance(group, SubscriptionGroup)
            letters = TopicConfig(0, name, queues=1, type=MessageType.MIXED)
            on_result(letters if is_there else absent)

        self._topics.get(name, looked)

    def known_topic(self, name: str) -> TopicConfig | None:
        """The cached topic, or None if a request is needed."""
        return self._topics.known(name, self._clock.boot_ms())

    def group(self, name: str, on_result: OnResult[SubscriptionGroup]) -> None:
        self._groups.get(name, on_result)

    def ids(self, topic: str, group: str, then: Callable[[int, int], None]) -> None:
        """Of both; 0 for what is not known, for the dead letters that each broker group has of its
        own, and for no group.  A single broker group is not asked: it has no older ones."""

        def group_known(topic_id: int, result: SubscriptionGroup | PopmqError) -> None:
            then(topic_id, 0 if isinstance(result, PopmqError) else result.id)

        def topic_known(result: TopicConfig | PopmqError) -> None:
            topic_id = (
                0 if isinstance(result, PopmqError) or is_internal_topic(topic) else result.id
            )
            if group:
                self._groups.get(group, partial(group_known, topic_id))
            else:
                then(topic_id, 0)

        if len(self._brokers.names()) > 1:
            self._topics.get(topic, topic_known)
        else:
            then(0, 0)

    def known_group_id(self, name: str) -> int:
        """Of the group as it is remembered; 0: nothing is."""
        known = self._groups.known(name, self._clock.boot_ms())
        return known.id if known is not None else 0

    def forget_topic(self, name: str) -> None:
        """Something contradicts what is remembered: ask again."""
        self._topics.forget(name)

    def _now_ms(self) -> int | None:
        """None while there is nobody to ask: what is remembered has to do."""
        names = self._brokers.names()
        away = bool(names) and not any(map(self._brokers.has_master, names))
        return None if away else self._clock.boot_ms()

    def _ask_topic(self, name: str, on_result: OnResult[_Described[TopicConfig]]) -> None:
        body = admin_pb2.DescribeTopicRequest(name=name).SerializeToString()
        then = partial(_decoded, _described_topic, on_result)
        everywhere = is_internal_topic(name)
        ask_any(self._brokers, Kind.DESCRIBE_TOPIC, body, then, until_found=everywhere)

    def _ask_group(self, name: str, on_result: OnResult[_Described[SubscriptionGroup]]) -> None:
        body = admin_pb2.DescribeGroupRequest(name=name).SerializeToString()
        then = partial(_decoded, _described_group, on_result)
        ask_any(self._brokers, Kind.DESCRIBE_GROUP, body, then)


def ask_any(
    brokers: BrokerPorts,
    kind: Kind,
    body: bytes,
    on_answer: OnBytes,
    *,
    timeout_ms: int = DESCRIBE_TIMEOUT_MS,
    until_found: bool = False,
) -> None:
    """Ask the broker groups in turn until one can be reached; its answer counts, also a refusal.

    `until_found`: one that does not know the topic is passed over, if another one does.
    """
    names = owner_first(brokers)
    if names and not brokers.has_master(names[0]):
        timeout_ms //= len(names)
    owner = brokers.owner()
    if len(names) > 1 and owner in names and not brokers.has_master(owner):
        away = Unavailable(f"broker group {owner}, which owns the topics, has no master now")
        on_answer = partial(_not_for_sure, on_answer, away)
    codes = (
        Code.HA_NOT_AVAILABLE,
        Code.PROXY_TIMEOUT,  # it only looks: another may be asked
        *((Code.TOPIC_NOT_FOUND,) if until_found else ()),
    )
    _ask_next(brokers, names, kind, body, timeout_ms, codes, on_answer)


def _ask_next(
    brokers: BrokerPorts,
    names: Sequence[str],
    kind: Kind,
    body: bytes,
    timeout_ms: int,
    passed_over: Sequence[Code],
    on_answer: OnBytes,
) -> None:
    if not names:
        on_answer(Unavailable("no broker is known yet"))
        return

    def one_answered(answer: bytes | PopmqError) -> None:
        next_one = isinstance(answer, PopmqError) and answer.code in passed_over
        if next_one and len(names) > 1:
            then = on_answer
            if isinstance(answer, PopmqError) and answer.code in _AWAY:
                then = partial(_not_for_sure, on_answer, answer)
            _ask_next(brokers, names[1:], kind, body, timeout_ms, passed_over, then)
        else:
            on_answer(answer)

    try:
        port = brokers.port(names[0])
    except PopmqError as error:
        one_answered(error)
        return
    wait_ms = min(timeout_ms, PATIENCE_MS) if len(names) > 1 else timeout_ms
    port.request(kind, body, wait_ms, one_answered)


def _not_for_sure(on_answer: OnBytes, away: PopmqError, answer: bytes | PopmqError) -> None:
    """What one does not know, another that is away may have: nobody is told that there is none."""
    if isinstance(answer, PopmqError) and answer.code in _NOT_FOUND:
        answer = Unavailable(f"{away}; others do not know it: {answer}")
    on_answer(answer)


def _is_absent(result: TopicConfig | PopmqError) -> bool:
    return isinstance(result, PopmqError) and result.code is Code.TOPIC_NOT_FOUND


def _described_topic(reply: bytes) -> _Described[TopicConfig]:
    decoded_reply = admin_pb2.TopicReply.FromString(reply)
    return _Described(topic_of(reply), (decoded_reply.meta_epoch, decoded_reply.meta_version))


def _described_group(reply: bytes) -> _Described[SubscriptionGroup]:
    decoded_reply = admin_pb2.GroupReply.FromString(reply)
    return _Described(group_of(reply), (decoded_reply.meta_epoch, decoded_reply.meta_version))


def _decoded(
    decode: Callable[[bytes], T], on_result: OnResult[T], answer: bytes | PopmqError
) -> None:
    if isinstance(answer, PopmqError):
        on_result(answer)
        return
    result: T | PopmqError
    try:
        result = decode(answer)
    except PopmqError as error:
        result = error
    except (DecodeError, KeyError, ValueError) as error:
        result = Refused(Code.INTERNAL_ERROR, f"a broker described something unreadable: {error}")
    on_result(result)


class _Known(NamedTuple, Generic[T]):
    described: _Described[T]
    until_ms: int  # then it is asked for again; FORGOTTEN: it is only compared with the next one
    asked_ms: int  # when the newest question was sent whose answer had this state or a newer one


FORGOTTEN = -1


def _is_older(answer: _Described[T], asked_ms: int, before: _Known[T]) -> bool:
    """Whether the answer is of an earlier state than what was remembered not long ago."""
    is_recent = asked_ms - before.asked_ms < NEWER_STATE_MS
    return is_recent and (0, 0) < answer.state < before.described.state


class _Remembered(Generic[T]):
    """Answers for TTL_MS from the question on, longer while `now_ms` is None; refusals are told and
    not remembered."""

    def __init__(
        self,
        ask: Callable[[str, OnResult[_Described[T]]], None],
        now_ms: Callable[[], int | None],
    ) -> None:
        self._ask = ask
        self._now_ms = now_ms
        self._known: dict[str, _Known[T]] = {}
        self._waiting: dict[str, list[OnResult[T]]] = {}

    def get(self, name: str, on_result: OnResult[T]) -> None:
        known, now_ms = self._known.get(name), self._now_ms()
        is_kept = known is not None and known.until_ms != FORGOTTEN
        if known is not None and is_kept and (now_ms is None or now_ms < known.until_ms):
            on_result(known.described.value)
            return
        if (waiting := self._waiting.get(name)) is not None:
            waiting.append(on_result)
            return
        self._waiting[name] = [on_result]
        self._ask(name, partial(self._answered, name, now_ms or 0))

    def known(self, name: str, now_ms: int) -> T | None:
        cached = self._known.get(name)
        return cached.described.value if cached is not None and now_ms < cached.until_ms else None

    def forget(self, name: str) -> None:
        if (known := self._known.get(name)) is not None:
            self._known[name] = known._replace(until_ms=FORGOTTEN)

    def _answered(self, name: str, asked_ms: int, answer: _Described[T] | PopmqError) -> None:
        before = self._known.pop(name, None)  # so that the dictionary stays in the order of asking
        result: T | PopmqError
        if isinstance(answer, PopmqError):
            result = answer
            if before is not None and answer.code in _AWAY:
                self._known[name] = before
        else:
            confirmed_ms = asked_ms
            if before is not None and _is_older(answer, asked_ms, before):
                answer, confirmed_ms = before.described, before.asked_ms
            if len(self._known) >= MAX_REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[name] = _Known(answer, asked_ms + TTL_MS, confirmed_ms)
            result = answer.value
        for on_result in self._waiting.pop(name):
            on_result(result)
