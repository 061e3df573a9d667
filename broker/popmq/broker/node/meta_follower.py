"""MetaFollower: a broker group that owns no topics copies those of the one that does (D7).

It asks the owner's master once a second, and at once when somebody names a topic or a group that
is not here.  What differs is appended to this group's own log, with the owner's ids, a piece a
step; the last record says up to where.  A state of the owner is an epoch of its master and a
version; one that is not newer than the copy is never followed.  While the owner is away, copies
serve on.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from popmq.broker.core.broker import Broker
from popmq.broker.meta.meta_records import group_of, topic_of
from popmq.broker.meta.registry import Registry, owned_records
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.topics import SubscriptionGroup, TopicConfig, is_internal_topic
from popmq.common.wire.meta_pb2 import MetaRecord
from popmq.common.wire.replication_pb2 import CopyMetaReply, CopyMetaRequest

logger = logging.getLogger(__name__)

ASK_MS = 1_000
AGAIN_MS = 100
ANSWER_MS = 5_000
CHANGES_A_STEP = 128
KEEP_ADDRESS_MS = 10_000  # how long the address of a newer master outlives the last who named it

MetadataChange = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Asking:
    """A question that is not answered yet. The owner may keep it back for a while, unless it names
    what somebody asked for here."""

    port: Port
    of: tuple[str, str]  # the owner, and the address of its master
    wanted: bool
    number: int = 0


class MetaFollower:
    """`hear` what the controllers say, and `step` while this broker is its group's master."""

    def __init__(
        self,
        *,
        cluster: str,
        group: str,
        open_port: Callable[[str], Port],
        now_ms: Callable[[], int],
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._open_port = open_port
        self._now_ms = now_ms
        self._owner = ""
        self._address = ""
        self._address_epoch = 0  # of the owner's master there
        self._address_ms = 0  # when a controller named it last
        self._broker: Broker | None = None  # the one that the changes are for
        self._changes: deque[MetadataChange] = deque()
        self._asking: _Asking | None = None
        self._unconfirmed = False  # the last copy: it is reported when a crash cannot undo it
        self._due_ms = 0
        self._complained = ""
        self.copies = 0

    def hear(self, owner: str, address: str, epoch: int = 0) -> None:
        """Who owns topics and groups, and where its master of `epoch` is; empty: not known.

        Two controllers may name two masters in turn; the one of the later epoch is asked.
        """
        self._owner = owner or self._owner
        now_ms = self._now_ms()
        newer = epoch >= self._address_epoch or now_ms - self._address_ms >= KEEP_ADDRESS_MS
        if address and newer:
            self._address, self._address_epoch, self._address_ms = address, epoch, now_ms

    def step(self, broker: Broker) -> int:
        """Ask, or append some of what is missing; returns how much was done."""
        if not self._owner or self._owner == self._group:
            return 0
        if broker is not self._broker:  # another life: what was planned is over
            self._broker = broker
            self._changes.clear()
            self._due_ms = 0
            self._unconfirmed = False
        if self._changes:
            return self._append(broker)
        registry, now_ms = broker.registry, self._now_ms()
        requested = bool(registry.missing_topics or registry.missing_groups)
        asking, of = self._asking, (self._owner, self._address)
        if asking is not None and (asking.of != of or (requested and not asking.wanted)):
            asking.port.cancel(asking.number)
            self._asking = None
        idle = self._asking is None and not self._unconfirmed
        if idle and self._address and (requested or now_ms >= self._due_ms):
            self._ask(broker, requested=requested)
        return 0

    def _append(self, broker: Broker) -> int:
        done = 0
        while self._changes and done < CHANGES_A_STEP:
            self._changes.popleft()()
            done += 1
        if not self._changes:
            self._unconfirmed = True
            broker.buffer.when_acks_confirmed(lambda: self._copied(broker))
        return done

    def _copied(self, broker: Broker) -> None:
        """Report it at once: a deletion may wait for it at the owner."""
        if broker is self._broker:
            self._unconfirmed = False
            self._due_ms = 0

    def _ask(self, broker: Broker, *, requested: bool) -> None:
        registry = broker.registry
        if self._must_not_follow(registry):
            return
        followed = registry.owner == self._owner
        known_epoch, known_version = registry.meta_state if followed else (0, 0)
        request = CopyMetaRequest(
            cluster=self._cluster,
            group=self._group,
            known_epoch=known_epoch,
            known_version=known_version,
            wait_ms=ASK_MS,
            topics=sorted(registry.missing_topics),
            groups=sorted(registry.missing_groups),
            fifo_groups=sorted(name for name, fifo in registry.missing_groups.items() if fifo),
        )
        registry.missing_topics.clear()
        registry.missing_groups.clear()
        port = self._open_port(self._address)
        asking = self._asking = _Asking(port, (self._owner, self._address), requested)
        self._due_ms = self._now_ms() + ASK_MS

        def answered(answer: bytes | PopmqError) -> None:
            if asking is not self._asking:
                return  # it was given up; ways may answer nevertheless
            self._asking = None
            if broker is not self._broker or asking.of[0] != self._owner:
                return
            if isinstance(answer, PopmqError):
                self._failed(answer)
                return
            try:
                reply = CopyMetaReply.FromString(answer)
                records = [MetaRecord.FromString(record) for record in reply.records]
            except DecodeError as error:
                logger.error("the owner's topics cannot be read", extra={"reason": str(error)})
                return
            if asking.wanted and reply.epoch:
                self._due_ms = 0  # the owner gets a question again that it can keep back
            self._hear_state(registry, records, reply.epoch, reply.version)

        asking.number = port.request(
            Kind.COPY_META, request.SerializeToString(), ANSWER_MS, answered
        )

    def _hear_state(
        self, registry: Registry, records: Sequence[MetaRecord], epoch: int, version: int
    ) -> None:
        """Follow the owner's state if it is newer than the copy. An owner of a version without
        epochs sends 0."""
        known = registry.meta_state if registry.owner == self._owner else (-1, 0)
        epochs = (epoch or registry.owner_epoch, version)
        if epochs < known:
            self._complain(
                f"the master of {self._owner} at {self._address} has an older state than the copy "
                f"here, which is of epoch {known[0]}: it is not followed"
            )
            return
        self._complained = ""
        if epochs > known:
            self.copies += 1
            self._plan(registry, records, *epochs)
            self._wake()

    def _wake(self) -> None:
        """The next step comes at once: somebody may wait for this copy."""
        if self._broker is not None:
            self._broker.store.call_soon(lambda: None)

    def _plan(
        self, registry: Registry, records: Sequence[MetaRecord], epoch: int, version: int
    ) -> None:
        """The owner comes first: half a copy must not look like topics of this group's own."""
        owner = self._owner
        if registry.owner != owner:
            self._changes.append(lambda: registry.set_copied_version(owner, 0, 0))
        self._changes.extend(differences(registry, records))
        self._changes.append(lambda: registry.set_copied_version(owner, epoch, version))

    def _failed(self, error: PopmqError) -> None:
        away = error.code in (Code.HA_NOT_AVAILABLE, Code.PROXY_TIMEOUT, Code.NOT_MASTER)
        if away:
            self._due_ms = self._now_ms() + AGAIN_MS
        else:
            self._complain(f"{self._owner} refuses to tell its topics: {error}")

    def _must_not_follow(self, registry: Registry) -> bool:
        """A group with topics of its own: their ids would meet the owner's."""
        if registry.owner and registry.owner != self._owner:
            self._complain(
                f"this log has the topics of {registry.owner}, the controller names "
                f"{self._owner} as their owner"
            )
            return True
        if registry.owner or not owned_records(registry):
            return False
        self._complain(
            f"this broker group has topics or consumer groups of its own, {self._owner} owns those "
            "of the cluster: they are not followed; begin with an empty data directory"
        )
        return True

    def _complain(self, reason: str) -> None:
        """Once for each reason."""
        self._due_ms = self._now_ms() + ASK_MS
        if reason != self._complained:
            self._complained = reason
            logger.error("topics are not followed", extra={"reason": reason})


def differences(registry: Registry, records: Sequence[MetaRecord]) -> Iterator[MetadataChange]:
    """What makes the registry like the owner's, in order; each may be done or not (a crash)."""
    topics = [topic_of(record.topic) for record in records if record.HasField("topic")]
    groups = [group_of(record.group) for record in records if record.HasField("group")]
    # An owner that lost a topic in an unclean election gives its id to another one.
    yield from _gone_topics(registry, {(topic.id, topic.name) for topic in topics})
    yield from _gone_groups(registry, {(group.id, group.name) for group in groups})
    for record in records:
        known: TopicConfig | SubscriptionGroup | None
        reply: TopicConfig | SubscriptionGroup
        if record.HasField("topic"):
            reply = topic_of(record.topic)
            known = registry.topic_by_id(reply.id)
        else:
            reply = group_of(record.group)
            known = registry.group_by_id(reply.id)
        if known != reply:
            yield _writing(registry, record)


def _writing(registry: Registry, record: MetaRecord) -> MetadataChange:
    return lambda: registry.apply_owner_record(record)


def _gone_topics(registry: Registry, kept: set[tuple[int, str]]) -> Iterator[MetadataChange]:
    here = [topic for topic in registry.topics() if not is_internal_topic(topic.name)]
    for topic in [topic for topic in here if (topic.id, topic.name) not in kept]:

        def remove(gone: TopicConfig = topic) -> None:
            if registry.topic_by_id(gone.id) is not None:
                registry.remove_topic(gone)

        yield remove


def _gone_groups(registry: Registry, kept: set[tuple[int, str]]) -> Iterator[MetadataChange]:
    for group in [group for group in registry.groups() if (group.id, group.name) not in kept]:

        def remove(gone: SubscriptionGroup = group) -> None:
            if registry.group_by_id(gone.id) is not None:
                registry.remove_group(gone)

        yield remove
