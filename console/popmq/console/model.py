"""What pages show, as values: times in wall milliseconds, 0 where there is none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", covariant=True)

OLD_MS = 60_000  # a message that has been ready for longer is worth a look


CountKey = tuple[str, str, str]  # (broker, group, topic)


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one moment: of all groups together, of one, or of a topic."""

    at_ms: int
    lag: int
    oldest_ms: int  # age of the oldest message that is ready
    stored: float  # messages a second
    delivered: float  # the same, with redeliveries


@dataclass(frozen=True, slots=True)
class Line:
    """Of a plot: values over wall milliseconds."""

    name: str
    points: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class LagRow:
    """What a group has still to do in one topic, or in all."""

    group: str
    topic: str
    ready: int
    in_flight: int
    delayed: int
    blocked: int
    retries: int
    expired: int
    oldest_age_ms: int | None  # None: nothing is ready

    @property
    def lag(self) -> int:
        return self.ready + self.in_flight + self.blocked


@dataclass(frozen=True, slots=True)
class BrokerNode:
    node: str
    role: str
    alive: bool
    in_sync: bool
    draining: bool
    epoch: int
    end: int  # bytes of log
    confirmed: int
    behind: int  # bytes of log that the furthest one of the group has more
    silent_ms: int
    address: str
    tables_differ: bool

    @property
    def leads(self) -> bool:
        return self.alive and self.role in ("opening", "master", "handing over")


@dataclass(frozen=True, slots=True)
class BrokerGroup:
    name: str
    trouble: str
    nodes: Sequence[BrokerNode]

    @property
    def draining(self) -> bool:
        return any(node.draining for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Overview:
    now_ms: int
    troubles: Sequence[str]
    notes: Sequence[str]
    brokers: Sequence[BrokerGroup]
    lags: Sequence[LagRow]  # the worst first
    topics: int
    dead: Mapping[str, int]  # by group, without those that were redriven
    timers: int
    timers_in_an_hour: int
    next_due_ms: int
    history: Sequence[Reading] = ()
    # Since brokers started: messages stored in a topic (without a group) or delivered to a group.
    counts: Mapping[CountKey, int] = field(default_factory=dict)
    lag_missing: str = ""  # why `lags` and `counts` are not those of every broker

    @property
    def oldest_age_ms(self) -> int | None:
        return max((row.oldest_age_ms for row in self.lags if row.oldest_age_ms), default=None)


@dataclass(frozen=True, slots=True)
class GroupRow:
    name: str
    type: str
    lag: LagRow  # of all its topics together
    topics: int
    dead: int


@dataclass(frozen=True, slots=True)
class TopicRow:
    name: str
    type: str
    queues: int
    permission: str
    groups: int
    lag: int
    timers: int


@dataclass(frozen=True, slots=True)
class QueueSpan:
    """One queue as a group sees it."""

    topic: str
    broker: str
    queue_id: int
    unread: int | None  # None: not known
    next_ms: int  # when the first message was stored that the group was not given
    newest_ms: int
    holders: Sequence[tuple[str, int]]  # client, and how many messages it has


@dataclass(frozen=True, slots=True)
class ParkedKey:
    topic: str
    key: str
    queue_id: int
    broker: str
    messages: int
    parked_ms: int
    state: str


@dataclass(frozen=True, slots=True)
class ConnectedClient:
    client_id: str
    kind: str
    language: str
    version: str
    protocol: str
    topics: Sequence[str]  # that it publishes to
    subscriptions: Sequence[tuple[str, str, str]]  # (group, topic, filter)
    address: str
    proxy: str
    since_ms: int
    silent_ms: int


@dataclass(frozen=True, slots=True)
class GroupView:
    now_ms: int
    name: str
    type: str
    settings: Mapping[str, str]
    lags: Sequence[LagRow]
    queues: Sequence[QueueSpan]
    members: Sequence[ConnectedClient]
    parked: Sequence[ParkedKey]
    parked_keys: int
    dead: int
    incomplete: str
    history: Sequence[Reading] = ()

    @property
    def findings(self) -> list[str]:
        """Why the group does not get on, or may not; empty when nothing seems to be wrong."""
        ready = sum(row.ready for row in self.lags)
        in_flight = sum(row.in_flight for row in self.lags)
        oldest = max((row.oldest_age_ms or 0 for row in self.lags), default=0)
        blocked = sum(row.blocked for row in self.lags)
        findings = []
        if ready and not self.members:
            findings.append(f"Stopped: no member is connected, and {ready} messages are ready.")
        elif oldest >= OLD_MS and in_flight:
            findings.append(
                f"Behind: the oldest ready message waits, while members hold {in_flight} others."
            )
        elif oldest >= OLD_MS:
            findings.append(
                "Stuck: members are connected, messages are ready, and nobody holds any."
            )
        if self.parked_keys:
            findings.append(f"{self.parked_keys} message groups are parked: see below.")
        if blocked:
            findings.append(f"{blocked} messages are blocked behind others of their message group.")
        if self.dead:
            findings.append(f"{self.dead} messages became dead letters.")
        return findings


@dataclass(frozen=True, slots=True)
class QueueView:
    broker: str
    queue_id: int
    start: int  # offset of the first message that is there
    end: int  # offset of the next one

    @property
    def key(self) -> str:
        return f"{self.queue_id}@{self.broker}"


@dataclass(frozen=True, slots=True)
class TopicView:
    now_ms: int
    name: str
    type: str
    permission: str
    settings: Mapping[str, str]
    queues: Sequence[QueueView]
    lags: Sequence[LagRow]
    timers: int
    history: Sequence[Reading] = ()
    missing: str = ""  # why queues are not shown


@dataclass(frozen=True, slots=True)
class StoredMessage:
    message_id: str
    topic: str
    broker: str
    queue_id: int
    queue_offset: int
    stored_ms: int
    tag: str
    keys: Sequence[str]
    message_group: str
    properties: Mapping[str, str]
    body: bytes
    text: str | None  # None: the body is no text
    record: str = ""  # of a system topic


@dataclass(frozen=True, slots=True)
class Step:
    """A record of the log that proves something."""

    what: str
    wall_ms: int
    position: int
    text: str


@dataclass(frozen=True, slots=True)
class GroupStory:
    """What became of a message for one group."""

    group: str  # empty: every group
    state: str
    since_ms: int
    until_ms: int
    attempt: int
    client: str
    why: str
    next: str
    steps: Sequence[Step]


@dataclass(frozen=True, slots=True)
class MessageStory:
    topic: str
    broker: str
    queue_id: int
    queue_offset: int  # -1: it is not in its topic
    stored_ms: int
    groups: Sequence[GroupStory]


@dataclass(frozen=True, slots=True)
class MessageView:
    now_ms: int
    message_id: str
    stories: Sequence[MessageStory]
    messages: Sequence[StoredMessage]
    incomplete: str


@dataclass(frozen=True, slots=True)
class TimerRow:
    topic: str
    message_id: str
    queue_id: int
    broker: str
    due_ms: int
    stored_ms: int
    state: str


@dataclass(frozen=True, slots=True)
class TimersView:
    now_ms: int
    pending: Mapping[str, int]  # by topic
    buckets: Sequence[tuple[int, int]]  # (within so many ms, count); -1: all later ones
    next_due_ms: int
    timers: Sequence[TimerRow]
    incomplete: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    broker: str
    queue_offset: int
    dead_ms: int
    attempts: int
    reason: str
    origin_topic: str
    redriven: bool
    message: StoredMessage

    @property
    def place(self) -> str:
        return f"{self.queue_offset}@{self.broker}"


@dataclass(frozen=True, slots=True)
class RedriveCounts:
    redriven: int = 0
    already: int = 0
    filtered: int = 0
    orphaned: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class RedriveFilter:
    """Which dead letters of a group; `places` (offset@broker) selects some of those looked at."""

    group: str
    topic: str = ""
    tag: str = ""
    key: str = ""
    after_ms: int = 0
    before_ms: int = 0
    reason: str = ""
    places: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ResetRow:
    topic: str
    broker: str
    queue_id: int
    before: int
    after: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Failover:
    from_node: str
    to_node: str
    epoch: int
    steps: Sequence[str]
    loss: str  # what is lost, or that nothing is


@dataclass(frozen=True, slots=True)
class SettingRow:
    key: str
    value: str
    process: str
    unit: str
    default: str
    is_default: bool
    meaning: str


@dataclass(frozen=True, slots=True)
class PageOf(Generic[T]):
    """Some of a longer list."""

    rows: Sequence[T]
    total: int
    first: int = 0  # the number of the first row


@dataclass(slots=True)
class RedriveJob:
    """A redrive that runs in this process; the next one goes on where it stopped."""

    id: str
    group: str
    started_ms: int
    rate: int
    done: RedriveCounts = field(default_factory=RedriveCounts)
    end: str = ""  # how it ended; empty: it runs
