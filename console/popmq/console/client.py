"""ConsoleClient: everything that the pages ask of a cluster, and the changes that they make.

It speaks the admin service and the public protocol of a proxy, through the client of the commands.
What only looks is shared by all pages for a moment (recent.py).  Every failure is a PopmqError
whose text can be shown to a person.
"""

import secrets
import time
from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import Message

from popmq.cli.brokers import failover_lines
from popmq.cli.browse import Browser
from popmq.cli.client import CallFailed, CallRefused, Client, Reply
from popmq.cli.local.config import running_rows
from popmq.cli.message_ids import MessageIds
from popmq.cli.send import built
from popmq.cli.status import ClusterView
from popmq.cli.terminal.command_line import Args
from popmq.cli.timers import check_outcome
from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.drain_remainder import drain_remainder, remainder_text
from popmq.common.settings.describe import descriptions, format_value
from popmq.common.wire import admin_pb2 as admin
from popmq.console import convert
from popmq.console.history import History
from popmq.console.model import (
    BrokerGroup,
    ConnectedClient,
    DeadLetter,
    Failover,
    GroupRow,
    GroupView,
    LagRow,
    MessageView,
    Overview,
    PageOf,
    ParkedKey,
    QueueSpan,
    QueueView,
    ResetRow,
    SettingRow,
    StoredMessage,
    TimersView,
    TopicRow,
    TopicView,
)
from popmq.console.recent import RecentAnswers

ROWS = 50  # of one page of a list
MAX_QUEUES = 64  # whose ends are asked for
HOUR_MS = 3_600_000

R = TypeVar("R", bound=Reply)
T = TypeVar("T")


class ConsoleClient:
    """Of one proxy, or of a balancer before several; threads share it."""

    def __init__(self, calls: Client) -> None:
        self.calls = calls
        self.endpoint = calls.endpoint
        self.history = History()
        self._recent = RecentAnswers()
        self._ids = MessageIds()

    def close(self) -> None:
        self.calls.close()

    # -- cluster

    def overview(self) -> Overview:
        return self._recent.get("overview", self._overview)

    def _overview(self) -> Overview:
        view = self._view()
        return Overview(
            now_ms=view.lag.now_ms or now_ms(),
            troubles=view.troubles,
            notes=view.notes,
            brokers=convert.broker_groups(view.brokers),
            lags=convert.lag_rows(view.lag),
            topics=len(view.topics),
            dead=convert.dead_letters_of(view.lag),
            timers=view.pending,
            timers_in_an_hour=sum(
                each.count for each in view.timers.buckets if 0 < each.within_ms <= HOUR_MS
            ),
            next_due_ms=view.timers.next_due_ms,
            history=self.history.of_all(),
            counts=convert.counts_of(view.lag),
            lag_missing=view.unknown.get("lag", "") or view.lag.incomplete,
        )

    def _view(self) -> ClusterView:
        return self._recent.get("view", lambda: ClusterView.of(self.calls))

    def brokers(self) -> list[BrokerGroup]:
        reply = self._look(admin.ListBrokersRequest(), admin.ListBrokersReply)
        return convert.broker_groups(reply.found)

    def sees_cluster(self) -> bool:
        """Whether the user may see what is about all topics and groups."""
        try:
            self.brokers()
        except CallRefused as error:
            return error.number != Code.FORBIDDEN
        except CallFailed:
            return False
        return True

    def failover(self, group: str, node: str, *, dry_run: bool) -> Failover:
        """Planned only: a replica outside of the SyncStateSet is refused."""
        request = admin.FailoverRequest(group=group, node=node, dry_run=dry_run)
        done = self._change(request, admin.FailoverReply).done
        *_, loss = failover_lines(group, done, dry_run=dry_run)
        return Failover(done.from_node, done.to_node, done.after.epoch, list(done.steps), loss)

    def drain(self, group: str, *, undo: bool) -> None:
        self._change(admin.DrainRequest(group=group, undo=undo), admin.DrainReply)

    def drain_rest(self, group: str) -> str:
        """What a broker group that is drained still has, in words."""
        look = admin.DrainRequest(group=group, look=True)
        try:
            counted = self._look(look, admin.DrainReply)
            view = self._view()
            _raise_unknown(view, "lag")
            _raise_unknown(view, "topics")
            rest, _ = drain_remainder(group, view.lag, view.topics, counted)
        except PopmqError as error:
            return f"What is left is not known: {error}"
        return remainder_text(group, rest)

    def clients(
        self, *, group: str = "", topic: str = "", after: str = ""
    ) -> tuple[list[ConnectedClient], str, str]:
        """Some of them, behind which id there are more (empty: nowhere), and what is missing."""
        request = admin.ListClientsRequest(group=group, topic=topic, after=after)
        reply = self._look(request, admin.ListClientsReply)
        return [convert.connected_client(c) for c in reply.clients], reply.until, reply.incomplete

    def settings(self, words: str) -> tuple[list[SettingRow], str]:
        """Those whose key or meaning has the words; and what is missing."""
        reply = self._look(admin.DescribeSettingsRequest(), admin.DescribeSettingsReply)
        rows = []
        known = descriptions()
        for row in running_rows(reply.processes):
            key = str(row["key"])
            about = known.get(key)
            rows.append(
                SettingRow(
                    key=key,
                    value=format_value(key, _as_default(row["value"])),
                    process=str(row["process"]),
                    unit=about.unit if about else "",
                    default=format_value(key, about.default) if about else "",
                    is_default=bool(row["default"]),
                    meaning=about.plain_meaning if about else "a setting of another version",
                )
            )
        wanted = words.lower()
        kept = [row for row in rows if wanted in f"{row.key} {row.meaning}".lower()]
        return kept, reply.incomplete

    # -- consumer groups

    def groups(self, words: str, first: int) -> PageOf[GroupRow]:
        """Those with `words` in their names, the worst first."""
        rows = self._recent.get("group rows", self._group_rows)
        return _page([row for row in rows if words.lower() in row.name.lower()], first)

    def _group_rows(self) -> list[GroupRow]:
        view = self._view()
        _raise_unknown(view, "lag")
        lags: dict[str, list[LagRow]] = {}
        for row in convert.lag_rows(view.lag):
            lags.setdefault(row.group, []).append(row)
        dead = convert.dead_letters_of(view.lag)
        rows = []
        for group in self._look(admin.ListGroupsRequest(), admin.ListGroupsReply).groups:
            own = lags.get(group.name, [])
            total = convert.total_row(group.name, own)
            rows.append(GroupRow(group.name, group.type, total, len(own), dead.get(group.name, 0)))
        rows.sort(key=lambda row: (-(row.lag.oldest_age_ms or 0), -row.lag.lag, row.name))
        return rows

    def group(self, name: str) -> GroupView:
        described = self._look(admin.DescribeGroupRequest(name=name, parked=True), admin.GroupReply)
        lag = self._look(admin.LagRequest(group=name), admin.LagReply)
        rows = convert.lag_rows(lag)
        # By name, so that brokers count what the group has not come to there.
        spans = self._look(
            admin.TimeSpansRequest(
                group=name, topics=sorted({row.topic for row in rows}), holders=True
            ),
            admin.TimeSpansReply,
        )
        members, _, members_missing = self.clients(group=name)
        missing = (described.incomplete, lag.incomplete, spans.incomplete, members_missing)
        return GroupView(
            now_ms=lag.now_ms,
            name=name,
            type=described.group.type,
            settings=convert.group_settings(described.group),
            lags=rows,
            queues=_queue_spans(spans),
            members=members,
            parked=[
                ParkedKey(
                    key.topic,
                    key.key,
                    key.queue_id,
                    key.broker,
                    key.messages,
                    key.parked_ms,
                    key.state,
                )
                for key in described.parked
            ],
            parked_keys=described.parked_keys,
            dead=convert.dead_letters_of(lag).get(name, 0),
            incomplete="; ".join(dict.fromkeys(filter(None, missing))),
            history=self.history.of_group(name),
        )

    def reset(
        self, group: str, topic: str, to: tuple[str, int], *, dry_run: bool
    ) -> list[ResetRow]:
        """`to` is the field of the request and its value, as `popmq reset-offset --to` reads it."""
        field, value = to
        request = admin.ResetOffsetRequest(group=group, topic=topic, dry_run=dry_run)
        setattr(request, field, bool(value) if field in ("oldest", "newest") else value)
        reply = self._change(request, admin.ResetOffsetReply)
        if reply.incomplete:
            raise Refused(Code.HA_NOT_AVAILABLE, f"not every broker answered: {reply.incomplete}")
        return [
            ResetRow(row.topic, row.broker, row.queue_id, row.before, row.after, row.in_flight)
            for row in reply.queues
        ]

    def unpark(self, group: str, topic: str, key: str, action: str) -> int:
        """How many messages it is about; `action` is resume, skip or dead-letter."""
        request = admin.UnparkRequest(group=group, topic=topic, key=key, action=action)
        return self._change(request, admin.UnparkReply).messages

    # -- topics and messages

    def topics(self, words: str, first: int) -> PageOf[TopicRow]:
        """Those with `words` in their names; the ones with the most to read come first."""
        rows = self._recent.get("topic rows", self._topic_rows)
        return _page([row for row in rows if words.lower() in row.name.lower()], first)

    def _topic_rows(self) -> list[TopicRow]:
        view = self._view()
        _raise_unknown(view, "topics")
        lags: dict[str, list[LagRow]] = {}
        for lag in convert.lag_rows(view.lag):
            lags.setdefault(lag.topic, []).append(lag)
        pending = {each.topic: each.count for each in view.timers.pending}
        rows = [
            TopicRow(
                topic.name,
                topic.type,
                topic.queues,
                topic.permission,
                groups=len(lags.get(topic.name, ())),
                lag=sum(lag.lag for lag in lags.get(topic.name, ())),
                timers=pending.get(topic.name, 0),
            )
            for topic in view.topics
        ]
        rows.sort(key=lambda row: (-row.lag, row.name))
        return rows

    def topic(self, name: str) -> TopicView:
        described = self._look(admin.DescribeTopicRequest(name=name), admin.TopicReply).topic
        lag = self._look(admin.LagRequest(topic=name), admin.LagReply)
        forecast = self._look(admin.ForecastTimersRequest(topic=name), admin.ForecastTimersReply)
        try:
            queues, missing = self._recent.get(("queues", name), lambda: self._queues(name)), ""
        except (CallRefused, CallFailed) as error:  # a topic that nobody may read has no route
            queues, missing = [], str(error)
        return TopicView(
            now_ms=lag.now_ms,
            name=name,
            type=described.type,
            permission=described.permission,
            settings=convert.topic_settings(described),
            queues=queues,
            lags=convert.lag_rows(lag),
            timers=sum(each.count for each in forecast.pending),
            history=self.history.of_topic(name),
            missing=missing,
        )

    def _queues(self, topic: str) -> list[QueueView]:
        route = self.calls.query_route(topic)
        return [
            QueueView(
                queue.broker.name,
                queue.id,
                start=self.calls.start_offset(queue),
                end=self.calls.end_offset(queue),
            )
            for queue in route[:MAX_QUEUES]
        ]

    def latest(self, topic: str, count: int) -> list[StoredMessage]:
        """The last ones of all queues, the newest first."""

        def ask() -> list[StoredMessage]:
            browser = Browser(self.calls, topic)
            messages = browser.latest(count)
            if browser.missing:  # the page shows all of them or says why not
                raise next(iter(browser.missing.values()))
            return [
                convert.stored_message(
                    admin.FoundMessage(
                        topic=topic,
                        queue_id=each.message.system_properties.queue_id,
                        queue_offset=each.message.system_properties.queue_offset,
                        stored_ms=each.stored_ms,
                        head=each.message.SerializeToString(),
                    )
                )
                for each in reversed(messages)
            ]

        return self._recent.get(("latest", topic, count), ask)

    def find(
        self, topic: str, *, key: str = "", queue: tuple[str, int] | None = None, offset: int = 0
    ) -> tuple[list[StoredMessage], str]:
        """By key, or of one queue (broker, id) from an offset on; and what is missing."""
        request = admin.FindMessagesRequest(topic=topic, limit=ROWS)
        if queue is None:
            request.key = key
        else:
            request.queue_id, request.queue_offset = queue[1], offset
        reply = self._look(request, admin.FindMessagesReply)
        # Every broker group answers for its own queue of that number.
        matches = [m for m in reply.messages if queue is None or m.broker == queue[0]]
        return [convert.stored_message(match) for match in matches], reply.incomplete

    def message(self, message_id: str) -> MessageView:
        """Raises MESSAGE_NOT_FOUND."""
        explained = self._look(admin.ExplainRequest(message_id=message_id), admin.ExplainReply)
        if not explained.messages:
            raise Refused(Code.MESSAGE_NOT_FOUND, f"no message {message_id} in any topic")
        messages: list[StoredMessage] = []
        for topic in sorted({each.topic for each in explained.messages}):
            request = admin.FindMessagesRequest(topic=topic, message_id=message_id, limit=4)
            reply = self._look(request, admin.FindMessagesReply)
            messages += map(convert.stored_message, reply.messages)
        return MessageView(
            now_ms=now_ms(),
            message_id=message_id,
            stories=[convert.message_story(message) for message in explained.messages],
            messages=messages,
            incomplete=explained.incomplete,
        )

    def new_message_id(self) -> str:
        """For `send`: a form that is sent twice stores one message."""
        return self._ids.next(now_ms() // 1000)

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        message_id: str,
        tag: str = "",
        key: str = "",
        message_group: str = "",
        delay_ms: int = 0,
    ) -> None:
        args = Args(
            topic=topic,
            tag=tag or None,
            key=[key] if key else [],
            group_key=message_group or None,
            delay=delay_ms or None,
            **dict.fromkeys(("at", "lite", "priority", "transaction", "spread")),
            property=(),
        )
        self.calls.send(built(args, body, message_id, now_ms()))
        self._recent.clear()

    def create_topic(self, name: str, kind: str, queues: int) -> None:
        topic = admin.Topic(name=name, type=kind, queues=queues)
        self._change(admin.CreateTopicRequest(topic=topic), admin.TopicReply)

    def alter_topic(self, name: str, *, queues: int, permission: str, retention_ms: int) -> None:
        """0 and empty leave what there is; -1 is the retention of the broker."""
        topic = admin.Topic(
            name=name, queues=queues, permission=permission, retention_ms=retention_ms
        )
        self._change(admin.AlterTopicRequest(topic=topic), admin.TopicReply)

    def delete_topic(self, name: str) -> None:
        self._change(admin.DeleteTopicRequest(name=name), admin.TopicReply)

    # -- timers

    def timers(
        self, *, topic: str = "", key: str = "", begin_ms: int = 0, end_ms: int = 0
    ) -> TimersView:
        forecast = self._look(admin.ForecastTimersRequest(topic=topic), admin.ForecastTimersReply)
        request = admin.ListTimersRequest(
            topic=topic, begin_ms=begin_ms, end_ms=end_ms, limit=ROWS, key=key
        )
        reply = self._look(request, admin.ListTimersReply)
        # A broker of an older version looks at no key, and lists all.
        timers = [timer for timer in reply.timers if timer.has_key or not key]
        return TimersView(
            now_ms=now_ms(),
            pending={each.topic: each.count for each in forecast.pending},
            buckets=[(each.within_ms, each.count) for each in forecast.buckets],
            next_due_ms=forecast.next_due_ms,
            timers=[convert.timer_row(timer) for timer in timers[:ROWS]],
            incomplete=reply.incomplete or forecast.incomplete,
        )

    def cancel_timer(self, topic: str, message_id: str) -> None:
        request = admin.RecallRequest(topic=topic, message_id=message_id)
        check_outcome(self._change(request, admin.RecallReply), topic, message_id)

    def reschedule_timer(self, topic: str, message_id: str, delay_ms: int) -> None:
        """From now on; 0 means at once."""
        request = admin.RescheduleRequest(
            topic=topic, message_id=message_id, new_due_ms=-max(1, delay_ms)
        )
        check_outcome(self._change(request, admin.RescheduleReply), topic, message_id)

    # -- dead letters

    def dead_letter_groups(self) -> dict[str, int]:
        view = self._view()
        _raise_unknown(view, "lag")
        return convert.dead_letters_of(view.lag)

    def dead_letters(
        self, group: str, *, broker: str = "", from_offset: int = 0
    ) -> tuple[list[DeadLetter], dict[str, tuple[int, int]], str]:
        """Some of each broker's, the oldest first; by broker where to go on, and its end; and what
        is missing."""
        request = admin.ListDeadLettersRequest(
            group=group, broker=broker, from_offset=from_offset, limit=ROWS, bodies=True
        )
        reply = self._look(request, admin.ListDeadLettersReply)
        ranges = {each.broker: (each.next_offset, each.end_offset) for each in reply.ranges}
        return [convert.dead_letter(letter) for letter in reply.letters], ranges, reply.incomplete

    def redrive(self, request: admin.RedriveRequest) -> admin.RedriveReply:
        """One piece, for redrives.py."""
        return self._change(request, admin.RedriveReply)

    # -- calls

    def _look(self, request: Message, reply_type: type[R]) -> R:
        key = (type(request).__name__, request.SerializeToString(deterministic=True))
        return self._recent.get(key, lambda: self.calls.call_admin(request, reply_type))

    def _change(self, request: Message, reply_type: type[R]) -> R:
        try:
            return self.calls.call_admin(request, reply_type)
        finally:
            self._recent.clear()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def new_job_id() -> str:
    return secrets.token_hex(6)


def _page(rows: Sequence[T], first: int) -> PageOf[T]:
    first = max(0, min(first, (len(rows) - 1) // ROWS * ROWS)) if rows else 0
    return PageOf(rows[first : first + ROWS], len(rows), first)


def _as_default(value: object) -> object:
    """JSON has lists where settings have tuples."""
    return tuple(value) if isinstance(value, list) else value


def _raise_unknown(view: ClusterView, part: str) -> None:
    """A list that could not be read is not shown as an empty one."""
    if part in view.unknown:
        raise CallFailed(view.unknown[part])
    if part in view.hidden:
        raise Refused(Code.FORBIDDEN, view.hidden[part])


def _queue_spans(reply: admin.TimeSpansReply) -> list[QueueSpan]:
    """The one with the oldest unread message first."""
    spans = [
        QueueSpan(
            topic=span.topic,
            broker=span.broker,
            queue_id=span.queue_id,
            unread=span.unread if span.HasField("unread") else None,
            next_ms=span.next_ms,
            newest_ms=span.newest_ms,
            holders=[(holder.client, holder.messages) for holder in span.holders],
        )
        for span in reply.spans
    ]
    far = 1 << 62
    return sorted(spans, key=lambda s: (s.next_ms or far, s.topic, s.broker, s.queue_id))
