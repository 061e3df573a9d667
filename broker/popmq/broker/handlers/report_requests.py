"""What reports ask: DESCRIBE_TABLES pins what there is, READ_RAW reads a range, NAMES tells ids.

Records go out as they lie on the disk, in pieces that the event loop hardly notices, and no more
a second than `reports.read_bytes_per_second` (docs/concepts/reports.md).
"""

from collections.abc import Collection, Iterator
from functools import partial
from itertools import islice

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.request import Request
from popmq.broker.log.consume_queue import ConsumeQueue
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.operations.resumable_reads import ResumableRead, confirmed, read
from popmq.common import topics
from popmq.common.errors import Code, Refused
from popmq.common.record.report_layouts import HEAD, LAYOUTS, OFFSET, RECORD, REVIVE, TABLES
from popmq.common.topics import MessageType, TopicConfig
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import report_pb2 as pb

REPLY_BYTES = 1 << 20
NAMES_LIMIT = 100_000  # of each kind
_HEADS_A_STEP = 256
_PARTITIONS_A_STEP = 1_000
_OK = admin.Status(code=Code.OK, message="OK")
_DELAYED = (MessageType.DELAY, MessageType.MIXED)


def _describe(broker: Broker, request: pb.DescribeRequest) -> ResumableRead[bytes]:
    requested = list(dict.fromkeys(request.tables)) or list(TABLES)
    for name in requested:
        if name not in TABLES:
            raise Refused(
                Code.BAD_REQUEST, f"a table is one of {', '.join(TABLES)}, not {name[:100]!r}"
            )
    for name in request.topics:
        broker.registry.topic(name)
    broker_table = pb.BrokerTables(
        broker=broker.settings.broker.name,
        epoch=broker.store.epoch,
        end_position=broker.store.end,
        wall_ms=broker.clock.wall_ms(),
        log_ms=broker.store.log_ms(),
        failing_percent=broker.settings.group.failing_percent,
        failing_least=broker.settings.group.failing_least,
    )
    if request.sample:
        broker_table.sample = yield from broker.diagnostics.sampler.take(patient=True)
    yield from confirmed(broker.store)  # so that queues have all that the sample knew
    partitions = _partitions(broker, requested, set(request.topics), request.offset_records)
    for number, partition in enumerate(partitions, 1):
        broker_table.partitions.append(partition)
        if number % _PARTITIONS_A_STEP == 0:
            yield from read(lambda: None)
    layouts = {partition.layout for partition in broker_table.partitions}
    broker_table.layouts.extend(_layout(name) for name in sorted(layouts))
    return pb.DescribeReply(status=_OK, brokers=[broker_table]).SerializeToString()


def _partitions(
    broker: Broker, requested: list[str], named: Collection[str], offset_records: bool
) -> Iterator[pb.Partition]:
    every = list(broker.registry.topics())
    chosen = [topic for topic in every if topic.name in named] if named else every
    for table in requested:
        if table in broker.diagnostics.sampler.logs:
            log = broker.diagnostics.sampler.logs[table]
            yield pb.Partition(table=table, layout=table, min=log.min, next=log.next)
        elif table == "revive":
            yield from _revive_partitions(broker, every, offset_records)
        else:
            layout = HEAD.name if table == "fired" else RECORD.name
            for topic in chosen:
                if topics.is_group_owned(topic.name) and not named:
                    continue
                if table == "fired" and topic.type not in _DELAYED:
                    continue
                for queue_id in broker.registry.queue_ids(topic):
                    if broker.registry.topic_by_id(topic.id) is None:
                        break  # deleted since the step before
                    yield _of_queue(broker, table, layout, topic, queue_id)


def _revive_partitions(
    broker: Broker, every: list[TopicConfig], offset_records: bool
) -> Iterator[pb.Partition]:
    """Check points and acks, and the retries and dead letters that are ends of theirs; with
    `offset_records` also resets, which end deliveries, and parked messages, which a reset of the
    queue that they came from takes back."""
    for number in range(topics.REVIVE_QUEUES):
        queue = broker.store.queue(topics.REVIVE_TOPIC_ID, number)
        yield pb.Partition(
            table="revive",
            layout=REVIVE.name,
            topic_id=topics.REVIVE_TOPIC_ID,
            queue_id=number,
            min=queue.min_offset,
            next=queue.count,
        )
    if offset_records:
        queue = broker.store.queue(topics.OFFSETS_TOPIC_ID, 0)
        yield pb.Partition(
            table="revive",
            layout=OFFSET.name,
            topic_id=topics.OFFSETS_TOPIC_ID,
            min=queue.min_offset,
            next=queue.count,
        )
    for topic in every:
        copies = topics.is_retry_topic(topic.name) or topics.is_dead_letter_topic(topic.name)
        copies = copies or (offset_records and topics.is_parked_topic(topic.name))
        if copies and broker.registry.topic_by_id(topic.id) is not None:
            yield _of_queue(broker, "revive", HEAD.name, topic, 0)


def _of_queue(
    broker: Broker, table: str, layout: str, topic: TopicConfig, queue_id: int
) -> pb.Partition:
    queue = broker.store.queue(topic.id, queue_id)
    return pb.Partition(
        table=table,
        layout=layout,
        topic=topic.name,
        topic_id=topic.id,
        queue_id=queue_id,
        min=queue.min_offset,
        next=queue.count,
    )


def _layout(name: str) -> pb.Layout:
    layout = LAYOUTS[name]
    fields = [
        pb.Field(name=field.name, type=field.type, offset=field.offset) for field in layout.fields
    ]
    return pb.Layout(name=name, version=layout.version, size=layout.size, fields=fields)


def _read_raw(broker: Broker, request: pb.ReadRawRequest) -> ResumableRead[bytes]:
    """At most 1 MiB, but one message always fits."""
    if request.layout not in LAYOUTS or getattr(request, "from") < 0:
        raise Refused(
            Code.BAD_REQUEST,
            f"a layout is one of {', '.join(LAYOUTS)}, not {request.layout[:100]!r}, and an "
            "offset is not negative",
        )
    wait_ms = broker.diagnostics.sampler.budget.wait_ms(broker.waits.boot_ms())
    if wait_ms:
        return pb.ReadRawReply(status=_OK, retry_after_ms=wait_ms).SerializeToString()
    if request.layout in broker.diagnostics.sampler.logs:
        data, first, after = _samples(broker, request)
    elif request.layout == REVIVE.name:
        data, first, after = yield from _revive_records(broker, request)
    else:
        data, first, after = yield from _log_records(broker, request)
    broker.diagnostics.sampler.budget.charge(len(data))
    reply = pb.ReadRawReply(status=_OK, data=data, next=after)
    setattr(reply, "from", first)
    return reply.SerializeToString()


def _samples(broker: Broker, request: pb.ReadRawRequest) -> tuple[bytes, int, int]:
    if request.epoch and request.epoch != broker.store.epoch:
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"broker {broker.settings.broker.name} started anew since (epoch {request.epoch} "
            f"is over, it is in {broker.store.epoch}): describe the tables again",
        )
    log, size = broker.diagnostics.sampler.logs[request.layout], LAYOUTS[request.layout].size
    first = max(getattr(request, "from"), log.min)
    end = max(first, min(request.next, log.next, first + REPLY_BYTES // size))
    return log.raw(first, end), first, end


def _revive_records(
    broker: Broker, request: pb.ReadRawRequest
) -> ResumableRead[tuple[bytes, int, int]]:
    if request.queue_id >= topics.REVIVE_QUEUES:
        raise Refused(Code.BAD_REQUEST, f"the revive topic has {topics.REVIVE_QUEUES} queues")
    queue = broker.store.queue(topics.REVIVE_TOPIC_ID, request.queue_id)
    first, end = _range(queue, request)
    limit = min(end - first, REPLY_BYTES // REVIVE.size)
    data = b""
    if limit > 0:
        data = yield from read(partial(queue.raw, first, limit, wait=False))
    return data, first, first + limit


def _log_records(
    broker: Broker, request: pb.ReadRawRequest
) -> ResumableRead[tuple[bytes, int, int]]:
    """Message records out of the log, whole or their heads, and offset records, in pieces."""
    queue = _queue(broker, request)
    head_bytes = {HEAD.name: HEAD.size, OFFSET.name: OFFSET.size}.get(request.layout, 0)
    first, end = _range(queue, request)
    at, size = first, 0
    parts: list[bytes] = []
    while at < end and size < REPLY_BYTES:
        limit = min(end - at, _HEADS_A_STEP)
        units = yield from read(partial(_units, broker, request, at, limit))
        if not head_bytes:
            units = units[: _fitting(units, REPLY_BYTES - size) or (0 if parts else 1)]
            if not units:
                break
        look = partial(broker.store.reader.raw, units, head_bytes, wait=False)
        pieces = yield from read(look)
        parts += pieces
        size += sum(map(len, pieces))
        at += len(units)
    return b"".join(parts), first, at


def _queue(broker: Broker, request: pb.ReadRawRequest) -> ConsumeQueue:
    """Of the system topics that of offset records alone is open, and by its own layout."""
    topic = broker.registry.topic_by_id(request.topic_id)
    known = topic is not None and request.queue_id in broker.registry.queue_ids(topic)
    if request.layout == OFFSET.name:
        known = (request.topic_id, request.queue_id) == (topics.OFFSETS_TOPIC_ID, 0)
    if not known:
        raise Refused(
            Code.NOT_FOUND, f"there is no queue {request.queue_id} of topic #{request.topic_id}"
        )
    return broker.store.queue(request.topic_id, request.queue_id)


def _units(broker: Broker, request: pb.ReadRawRequest, at: int, limit: int) -> list[QueueUnit]:
    """TopicNotFound: it was deleted since the step before, with the queue's files."""
    queue = broker.store.queue(request.topic_id, request.queue_id)
    return queue.units(at, limit, wait=False)


def _fitting(units: list[QueueUnit], limit: int) -> int:
    """How many of them are at most `limit` bytes together."""
    total = 0
    for number, (_, size, _) in enumerate(units):
        total += size
        if total > limit:
            return number
    return len(units)


def _range(queue: ConsumeQueue, request: pb.ReadRawRequest) -> tuple[int, int]:
    first = max(getattr(request, "from"), queue.min_offset)
    return first, max(first, min(request.next, queue.count))


def _names(broker: Broker) -> ResumableRead[bytes]:
    yield from read(lambda: None)
    broker_name = pb.BrokerNames(broker=broker.settings.broker.name)
    for topic in islice(broker.registry.topics(), NAMES_LIMIT):
        broker_name.topics.add(id=topic.id, name=topic.name)
    for group in islice(broker.registry.groups(), NAMES_LIMIT):
        broker_name.groups.add(id=group.id, name=group.name)
    for number, name in broker.deliveries.clients.items():
        broker_name.clients.add(id=number, name=name)
    return pb.NamesReply(status=_OK, brokers=[broker_name]).SerializeToString()


def describe_tables(broker: Broker, request: Request) -> ResumableRead[bytes]:
    return _describe(broker, pb.DescribeRequest.FromString(request.body))


def read_raw(broker: Broker, request: Request) -> ResumableRead[bytes]:
    return _read_raw(broker, pb.ReadRawRequest.FromString(request.body))


def names(broker: Broker, request: Request) -> ResumableRead[bytes]:
    pb.NamesRequest.FromString(request.body)
    return _names(broker)
