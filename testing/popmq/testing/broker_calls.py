"""Small synchronous calls to a test's broker, over its real port.

For what surrounds the code under test: make a topic, send what it is to consume, look at what
it left behind.  The code under test itself uses the client that it uses in production.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from google.protobuf.timestamp_pb2 import Timestamp

from popmq.cli.message_ids import MessageIds
from popmq.common.errors import ConfigError
from popmq.common.quantities import DAY_MS, parse_duration_ms
from popmq.common.signing import Signer
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api

if TYPE_CHECKING:
    from popmq.cli.client import Client

MAX_DURATION_DAYS = 36_500

Duration = str | timedelta


@dataclass(frozen=True, slots=True)
class Received:
    """A delivered message; hand it to `ack`."""

    message_id: str
    body: bytes
    attempt: int
    tag: str
    keys: tuple[str, ...]
    properties: Mapping[str, str]
    topic: str
    group: str
    handle: str = field(repr=False)


class BrokerCalls:
    """Each call raises PopmqError when the broker refuses it, in the broker's words."""

    def __init__(self) -> None:
        self._ids = MessageIds()
        self._opened: Client | None = None
        self._opening = threading.Lock()

    def create_topic(
        self, name: str, *, type: str = "normal", queues: int = 8, retention: Duration = "0s"
    ) -> None:
        """`retention` of 0 is that of the store. Topics are made by a first send, too."""
        topic = admin.Topic(
            name=name,
            type=type,
            queues=queues,
            permission="rw",
            retention_ms=milliseconds(retention),
        )
        self._client().topic(admin.CreateTopicRequest(topic=topic))

    def create_group(
        self,
        name: str,
        *,
        type: str = "normal",
        max_attempts: int = 17,
        start: str = "oldest",
        back_off: Iterable[Duration] = (),
    ) -> None:
        """`start` is `oldest` or `newest`. Groups are made by a first receive, too."""
        group = admin.Group(
            name=name,
            type=type,
            max_attempts=max_attempts,
            start_at=start,
            back_off_ms=map(milliseconds, back_off),
        )
        self._client().group(admin.CreateGroupRequest(group=group))

    def send(
        self,
        topic: str,
        body: bytes | str,
        *,
        tag: str = "",
        keys: Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        delay: Duration = "0s",
    ) -> str:
        """Send a message; returns its id once the broker has it durable.

        With a `delay` it is delivered when so much of the broker's time is over.
        """
        properties = dict(properties or {})
        if delay_ms := milliseconds(delay):
            properties["TIMER_DELAY_MS"] = str(delay_ms)
        system = api.SystemProperties(
            keys=keys,
            message_id=self._ids.next(time.time_ns() // 1_000_000_000),
            body_encoding=api.IDENTITY,
            message_type=api.NORMAL,
            born_timestamp=_now(),
        )
        if tag:
            system.tag = tag
        message = api.Message(
            topic=api.Resource(name=topic),
            user_properties=properties,
            system_properties=system,
            body=body.encode() if isinstance(body, str) else body,
        )
        return self._client().send(message).message_id

    def receive(
        self,
        topic: str,
        group: str,
        *,
        limit: int = 32,
        wait: Duration = "0s",
        invisible: Duration = "60s",
    ) -> list[Received]:
        """Up to `limit` messages; empty when none came within `wait` of real time.

        `%DLQ%<group>` is a topic like others: receive from it to see dead letters.
        """
        messages = self._client().receive(
            group,
            api.MessageQueue(topic=api.Resource(name=topic), id=-1),
            limit=limit,
            wait_ms=milliseconds(wait),
            invisible_ms=milliseconds(invisible),
        )
        return [_received(message, topic, group) for message in messages]

    def ack(self, *received: Received) -> None:
        for item in received:
            system = api.SystemProperties(message_id=item.message_id, receipt_handle=item.handle)
            message = api.Message(system_properties=system)
            self._client().ack(item.group, item.topic, [message])

    def _client(self) -> "Client":
        with self._opening:
            if self._opened is None:
                from popmq.cli.client import Client  # 80 ms, of a test that calls nothing itself

                self._opened = Client(self._address(), signer=self._signer())
            return self._opened

    def _hang_up(self) -> None:
        """A connection to a broker that went away would wait before it tries again."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _address(self) -> str:
        raise NotImplementedError

    def _signer(self) -> Signer:
        """The user that makes these calls; none, unless a subclass has one."""
        return Signer()


def milliseconds(duration: Duration) -> int:
    """ValueError for what is no duration, is negative, or is longer than a century."""
    if isinstance(duration, timedelta):
        found_duration = duration // timedelta(milliseconds=1)
    elif isinstance(duration, str):
        try:
            found_duration = _parsed(duration)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    else:
        raise ValueError(f"{duration!r} is not a duration: write '90s', '3d' or a timedelta")
    if found_duration < 0:
        raise ValueError(f"{duration!r} is negative: time does not go back")
    if found_duration > MAX_DURATION_DAYS * DAY_MS:
        raise ValueError(f"{duration!r} is over the limit of {MAX_DURATION_DAYS}d")
    return found_duration


def _parsed(text: str) -> int:
    if len(text) > 100:  # Python refuses to read numbers of thousands of digits
        return DAY_MS * DAY_MS
    try:
        return parse_duration_ms(text)
    except ConfigError:
        if not text.startswith("-") or text.startswith("--"):
            raise
        return -parse_duration_ms(text[1:])


def _now() -> Timestamp:
    now = Timestamp()
    now.GetCurrentTime()
    return now


def _received(message: api.Message, topic: str, group: str) -> Received:
    system = message.system_properties
    return Received(
        message_id=system.message_id,
        body=message.body,
        attempt=system.delivery_attempt,
        tag=system.tag,
        keys=tuple(system.keys),
        properties=dict(message.user_properties),
        topic=topic,
        group=group,
        handle=system.receipt_handle,
    )
