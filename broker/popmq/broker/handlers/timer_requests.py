"""RECALL, RESCHEDULE, LIST_TIMERS and FORECAST_TIMERS (docs/concepts/timer.md)."""

from functools import partial
from heapq import nsmallest
from typing import NamedTuple

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.request import Request
from popmq.broker.index.message_keys import ID, KEY, names_in
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.operations.resumable_reads import ResumableRead, confirmed, read, read_now
from popmq.broker.timer.timer_forecast import BUCKETS_MS, DueCounts
from popmq.broker.timer.timer_recall import StoredTimer
from popmq.broker.timer.timer_state import Timer
from popmq.common.errors import Code, Refused
from popmq.common.record.message import StoredMessage
from popmq.common.record.timer_token import TimerToken
from popmq.common.topics import check_readable_topic_name
from popmq.common.wire import admin_pb2 as pb

ID_LIMIT = 1_024  # characters
LOOKED_LIMIT = 200_000  # timers that one listing looks at
LIST_LIMIT = 1_000  # and that it names
LOOKED_FOR_KEY = 10_000  # whose messages are read to find a key
_DEFAULT_LIMIT = 100
_A_STEP = 4_096
_BODIES_A_STEP = 8
_LATER_MS = 1 << 62


def recall(broker: Broker, request: Request) -> ResumableRead[bytes]:
    """The due time tells messages of one id apart: that of the send, or of any rescheduling."""
    requested = pb.RecallRequest.FromString(request.body)
    topic_id, message_id = _topic_id(broker, requested.topic), _checked_id(requested.message_id)

    def step() -> bytes:
        broker.store.guard.check_write()
        outcome = broker.timers.recall.recall(topic_id, message_id, requested.due_ms)
        moved_to = broker.timers.outgoing_timers.targets
        return pb.RecallReply(status=_ok(), outcome=outcome, moved_to=moved_to).SerializeToString()

    return read_now(step)


def reschedule(broker: Broker, request: Request) -> ResumableRead[bytes]:
    requested = pb.RescheduleRequest.FromString(request.body)
    topic_id, message_id = _topic_id(broker, requested.topic), _checked_id(requested.message_id)
    if not requested.new_due_ms:
        raise Refused(Code.ILLEGAL_DELIVERY_TIME, "a rescheduling without a new time")

    def step() -> bytes:
        broker.store.check_admission()
        recalls = broker.timers.recall
        outcome, due_ms = recalls.reschedule(topic_id, message_id, requested.new_due_ms)
        return pb.RescheduleReply(status=_ok(), outcome=outcome, due_ms=due_ms).SerializeToString()

    return read_now(step)


def list_timers(broker: Broker, request: Request) -> ResumableRead[bytes]:
    return _list(broker, pb.ListTimersRequest.FromString(request.body))


def forecast_timers(broker: Broker, request: Request) -> ResumableRead[bytes]:
    return _forecast(broker, pb.ForecastTimersRequest.FromString(request.body))


class TimerFilter(NamedTuple):
    """`topic_id` None: all topics."""

    topic_id: int | None
    begin_ms: int
    end_ms: int
    limit: int

    def takes(self, timer: Timer) -> bool:
        right = self.topic_id is None or timer.topic_id == self.topic_id
        return right and self.begin_ms <= timer.due_ms < self.end_ms


class PendingTimerScan:
    """The pending timers that are due first, as far as they were looked at."""

    def __init__(self, broker: Broker, params: TimerFilter) -> None:
        self._broker = broker
        self._timers = broker.timers
        self._want = params
        self._found: dict[int, Timer] = {}  # by identity
        self._looked = 0
        self._rebuilds = self._timers.service.rebuilds
        self.incomplete = ""

    @property
    def first(self) -> list[Timer]:
        """At most as many as were wanted, by (due time, identity), and pending now."""
        return nsmallest(self._want.limit, self.found, key=lambda timer: timer.key)

    @property
    def found(self) -> list[Timer]:
        """All that were found and are pending now, in no order."""
        return [timer for timer in self._found.values() if _is_pending(self._broker, timer)]

    def look(self) -> ResumableRead[None]:
        """The late ones, those that were not enqueued yet, and the wheel."""
        service = self._timers.service
        recent = service.queue.not_enqueued()
        not_here = service.enqueue.behind - len(recent)
        beside = self._timers.timers_outside_wheel()
        for at in range(0, len(beside), _A_STEP):
            yield from read(partial(self._take_all, beside[at : at + _A_STEP]))
        scan = self._timers.scan(self._want.end_ms)
        while self._looked < LOOKED_LIMIT:
            units = yield from read(scan.units)
            if not units:
                break
            self._take_all(
                [Timer(unit.due_ms, unit.identity, unit.position, unit.size, unit.topic_id, 0)
                 for unit in units]
            )  # fmt: skip
            if self._is_done(scan.at_ms):
                break
        else:
            self.incomplete = f"only {self._looked} timers of the wheel were looked at"
        if not_here > 0:
            self.incomplete = f"{not_here} timers are on their way into the wheel"
        if service.rebuilds != self._rebuilds or service.enqueue.going_back:
            self.incomplete = "the timer wheel is being made anew"

    def _take_all(self, timers: list[Timer]) -> None:
        for timer in timers:
            self._looked += 1
            if self._want.takes(timer) and _is_pending(self._broker, timer):
                known = self._found.get(timer.identity)
                if known is None or known.position <= timer.position:
                    self._found[timer.identity] = timer

    def _is_done(self, slot_ms: int) -> bool:
        """No slot from `slot_ms` on holds one that is due before those found.

        What came too late for its own slot stands in a later one, the latest of which is known.
        """
        early_ms = self._timers.files.early_ms
        if len(self._found) <= self._want.limit or slot_ms <= early_ms:
            return False
        first = self.first
        if len(first) < self._want.limit:
            return False
        self._found = {timer.identity: timer for timer in first}
        return first[-1].due_ms < slot_ms


def _list(broker: Broker, request: pb.ListTimersRequest) -> ResumableRead[bytes]:
    limit = request.limit or _DEFAULT_LIMIT
    if not 0 < limit <= LIST_LIMIT:
        raise Refused(Code.BAD_REQUEST, f"limit {limit}: a list has 1 to {LIST_LIMIT} timers")
    topic_id = _topic_id(broker, request.topic) if request.topic else None
    end_ms = request.end_ms or _LATER_MS
    params = TimerFilter(topic_id, request.begin_ms, end_ms, limit)
    reply = pb.ListTimersReply(status=_ok())
    yield from confirmed(broker.store)
    if request.message_id:
        find = partial(broker.timers.recall.find, topic_id, _checked_id(request.message_id))
        stored, reply.incomplete = yield from read(find)
        stored = [timer for timer in stored if params.takes(timer.timer)]
        stored = [timer for timer in stored if broker.timers.recall.is_pending(timer)]
        stored.sort(key=lambda timer: timer.timer.key)
    else:
        if request.key:
            params = params._replace(limit=LOOKED_FOR_KEY)
        waiting = PendingTimerScan(broker, params)
        yield from waiting.look()
        reply.incomplete = waiting.incomplete
        yield from confirmed(broker.store)
        first = waiting.first
        if request.key and len(first) == LOOKED_FOR_KEY:
            reply.incomplete = f"only the {LOOKED_FOR_KEY} timers that are due first were looked at"
        stored = yield from _with_messages(broker, first, request.key.encode())
    timers = [_to_wire(broker, timer, request.message_id) for timer in stored[:limit]]
    for timer in timers:
        timer.has_key = bool(request.key) and not request.message_id
    reply.timers.extend(timers)
    return reply.SerializeToString()


def _with_messages(
    broker: Broker, timers: list[Timer], key: bytes
) -> ResumableRead[list[StoredTimer]]:
    """Those whose message has the key; with an empty one all."""
    stored_timers: list[StoredTimer] = []
    for at in range(0, len(timers), _BODIES_A_STEP):
        some = timers[at : at + _BODIES_A_STEP]
        units = [QueueUnit(timer.position, timer.size, 0) for timer in some]
        messages = yield from read(partial(broker.store.reader.read, units, wait=False))
        stored_timers += [
            StoredTimer(timer, message, timer.position != timer.identity)
            for timer, message in zip(some, messages, strict=True)
            if not isinstance(message, DamagedMessage)
            and _is_pending(broker, timer)
            and (not key or (KEY, key) in names_in(message.properties))
        ]
    return stored_timers


def _to_wire(broker: Broker, stored: StoredTimer, message_id: str) -> pb.Timer:
    timer, message, _ = stored
    token = message.any_token
    late = timer.identity in broker.timers.state.late
    return pb.Timer(
        topic=topic_name(broker, timer.topic_id),
        queue_id=token.queue_id if isinstance(token, TimerToken) else 0,
        message_id=message_id or _id_of(message),
        due_ms=timer.due_ms,
        stored_ms=message.header.wall_ms,
        position=timer.identity,
        offset=message.header.queue_offset,
        state="LATE" if late else "PENDING",
        broker=broker.settings.broker.name,
    )


def _forecast(broker: Broker, request: pb.ForecastTimersRequest) -> ResumableRead[bytes]:
    """Of one topic by its timers; of all by the slots' counts, which is faster."""
    topic_id = _topic_id(broker, request.topic) if request.topic else None
    counted = DueCounts(broker.clock.wall_ms(), broker.settings.timer, broker.timers.state)
    limit = 1 if topic_id is None else LOOKED_LIMIT
    waiting = PendingTimerScan(broker, TimerFilter(topic_id, 0, _LATER_MS, limit))
    yield from waiting.look()
    timers = waiting.found
    if topic_id is None:
        scan = broker.timers.scan()
        while (yield from read(partial(counted.add_slots, scan))):
            pass
    recent = broker.timers.service.queue.not_enqueued()
    counted.add_timers(recent if topic_id is None else timers)
    pending = broker.timers.state.pending
    return pb.ForecastTimersReply(
        status=_ok(),
        pending=[
            pb.ForecastTimersReply.Pending(topic=topic_name(broker, number), count=count)
            for number, count in sorted(pending.items())
            if topic_id in (None, number)
        ],
        buckets=[
            pb.ForecastTimersReply.Bucket(within_ms=within_ms, count=count)
            for within_ms, count in zip((*BUCKETS_MS, -1), counted.counts, strict=True)
        ],
        next_due_ms=min((timer.due_ms for timer in timers), default=0),
        incomplete=waiting.incomplete,
    ).SerializeToString()


def topic_name(broker: Broker, topic_id: int) -> str:
    """A deleted topic has one too: its timers become dead letters when their time comes."""
    return broker.registry.topic_label(topic_id)


def _topic_id(broker: Broker, name: str) -> int:
    check_readable_topic_name(name)
    return broker.registry.topic(name).id


def _checked_id(message_id: str) -> str:
    if not 0 < len(message_id) <= ID_LIMIT:
        raise Refused(
            Code.ILLEGAL_MESSAGE_ID,
            f"a message id of {len(message_id)} characters: it takes 1 to {ID_LIMIT}",
        )
    return message_id


def _id_of(message: StoredMessage) -> str:
    names = [name for kind, name in names_in(message.properties) if kind == ID]
    return names[0].decode(errors="replace") if names else ""


def _ok() -> pb.Status:
    return pb.Status(code=Code.OK, message="OK")


def _is_pending(broker: Broker, timer: Timer) -> bool:
    moved = timer.position != timer.identity
    return broker.timers.state.is_pending(*timer.key, timer.offset, moved=moved)
