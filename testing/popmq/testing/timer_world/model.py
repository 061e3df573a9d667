"""TimerModel: reads the confirmed log once more and works out, with plain sets, what it says of
timers. That is which fired, in which order, and whether each record was right where it stands."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from popmq.common import topics
from popmq.common.record.message import (
    HEADER_SIZE,
    Header,
    RecordKind,
    StoredMessage,
    decode_header,
    decode_message,
)
from popmq.common.record.timer_migration import decode_timer_record
from popmq.common.record.timer_token import (
    FiringToken,
    TimerEnd,
    TimerRecount,
    TimerToken,
)
from popmq.testing.sim.simulated_broker import SimulatedBroker

Complain = Callable[[str, str, int], None]  # invariant, what, number of the message


@dataclass(slots=True, eq=False)
class TimerHistory:
    """One record of the timer queue, with all that later records say of it."""

    number: int
    due_ms: int
    identity: int
    topic_id: int
    queue_id: int
    offset: int
    position: int  # of its newest body
    stored_wall_ms: int
    moves: int = 0
    late: bool = False
    ends: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        return self.due_ms, self.identity


class TimerModel:
    def __init__(self, machine: SimulatedBroker, complain: Complain) -> None:
        self._machine = machine
        self._complain = complain
        self._folder = f"{machine.settings.broker.data}/commitlog"
        self._size = machine.settings.store.segment_bytes
        self.scanned = 0
        self.cursor = (0, 0)
        self.classified = 0
        self.pending: dict[int, TimerHistory] = {}
        self.by_number: dict[int, list[TimerHistory]] = {}
        self.copies: Counter[int] = Counter()  # visible ones and dead letters, by number
        self.at_once: set[int] = set()  # numbers that were due when they came
        self.fired: list[tuple[TimerHistory, FiringToken, Header, StoredMessage]] = []
        # By topic: how many more than wait a record said, which the next one mends.
        self.miscounted: dict[int, int] = {}
        self._timers: dict[int, TimerHistory] = {}
        self._queue: list[tuple[TimerHistory, bool]] = []  # and whether the record is a moved body
        self._wheel: list[tuple[int, int]] = []

    @property
    def log_start(self) -> int:
        return int((self._machine.disk.names(self._folder) or ["0"])[0])

    def read_on(self) -> None:
        """Whatever was confirmed since the last time."""
        end = self._machine.broker.store.confirmed
        while self.scanned < end:
            start = self.scanned - self.scanned % self._size
            stop = min(end, start + self._size)
            file = self._machine.disk.open(f"{self._folder}/{start:020d}")
            before = self.scanned
            self._read(file.read(stop - before, before - start), start + self._size)
            assert self.scanned > before, f"the log is confirmed to {end}, and ends at {before}"

    def of(self, number: int) -> list[TimerHistory]:
        """Its timers, oldest first; all but the last one were replaced."""
        return self.by_number.get(number, [])

    @property
    def counts(self) -> dict[int, int]:
        """Pending ones by topic."""
        return dict(Counter(timer.topic_id for timer in self.pending.values()))

    # -- inside

    def _read(self, data: bytes, segment_end: int) -> None:
        at, base = 0, self.scanned
        while True:
            # Too few for a header; a segment that a crash left shorter does not have them.
            if segment_end - base - at < HEADER_SIZE:
                at = segment_end - base
                break
            if at >= len(data):
                break
            header = decode_header(data, at)
            if header.kind == RecordKind.PADDING:
                at = segment_end - base
                break
            record = data[at : at + header.size]
            at += header.size
            if header.kind == RecordKind.TIMER:
                match decode_timer_record(record[HEADER_SIZE:]):
                    case TimerRecount() as recount:
                        self._recounted(recount)
                    case FiringToken() as ending:
                        self._ended(ending, header, None)
                    case other:
                        raise AssertionError(f"nobody drains this broker: {other}")
            elif header.kind == RecordKind.MESSAGE:
                self._message(header, decode_message(record))
        self.scanned = base + at

    def _message(self, header: Header, message: StoredMessage) -> None:
        number = number_of(message.head)
        match message.any_token:
            case TimerToken() as token if header.topic_id == topics.TIMER_TOPIC_ID:
                self._stored(token, header, message, number)
            case FiringToken() as token:
                self._ended(token, header, message)
            case None if number >= 0:
                self.copies[number] += 1
                self.at_once.add(number)

    def _stored(
        self, token: TimerToken, header: Header, message: StoredMessage, number: int
    ) -> None:
        if header.queue_offset != len(self._queue):
            self._complain("timer queue", f"{header.queue_offset} after {len(self._queue)}", number)
        if token.moved_from is not None:
            timer = self._timers[token.moved_from]
            timer.position, timer.moves = header.position, timer.moves + 1
            self._queue.append((timer, True))
            return
        timer = TimerHistory(
            number,
            message.tag_hash,
            header.position,
            token.topic_id,
            token.queue_id,
            header.queue_offset,
            header.position,
            header.wall_ms,
        )
        self._timers[timer.identity] = self.pending[timer.identity] = timer
        self.by_number.setdefault(number, []).append(timer)
        self._queue.append((timer, False))
        if token.replaces is not None:
            self._end(self._timers[token.replaces[1]], "replaced")

    def _ended(self, token: FiringToken, header: Header, message: StoredMessage | None) -> None:
        timer = self._timers.get(token.identity)
        if timer is None or timer.due_ms != token.due_ms:
            self._complain("I4 exactly-once", f"nobody sent what {token} ends", -1)
            return
        self._judge(token.classified)
        match token.outcome:
            case TimerEnd.CANCELLED:
                self._end(timer, "cancelled")
                return
            case TimerEnd.LOST:
                self._complain("I1 no-loss", f"given up: {token}", timer.number)
            case TimerEnd.FIRED | TimerEnd.DEAD_LETTERED:
                assert message is not None, "a firing without a message"
                self.copies[timer.number] += 1
                self.fired.append((timer, token, header, message))
        self._check_moment(timer, token, header)
        self._end(timer, "fired" if token.outcome is TimerEnd.FIRED else "dead")

    def _recounted(self, record: TimerRecount) -> None:
        more = record.pending - self.counts.get(record.topic_id, 0)
        self.miscounted[record.topic_id] = more
        if not more:
            del self.miscounted[record.topic_id]

    def _end(self, timer: TimerHistory, how: str) -> None:
        timer.ends.append(how)
        if self.pending.pop(timer.identity, None) is None:
            self._complain("I4 exactly-once", f"{timer} ended more than once", timer.number)

    def _judge(self, until: int) -> None:
        """Records below `until` were enqueued before the record that says so."""
        for timer, moved in self._queue[self.classified : until]:
            if moved or timer.ends:
                continue
            timer.late = timer.key <= self.cursor
            if not timer.late:
                heappush(self._wheel, timer.key)
        self.classified = max(self.classified, until)

    def _check_moment(self, timer: TimerHistory, token: FiringToken, header: Header) -> None:
        number = timer.number
        if header.wall_ms < timer.due_ms:
            early = timer.due_ms - header.wall_ms
            self._complain("I3 no-early", f"{timer} fired {early} ms too early", number)
        if token.classified > len(self._queue) or timer.offset >= token.classified:
            self._complain(
                "E", f"{timer}: {token.classified} of {len(self._queue)} enqueued", number
            )
        if token.late != timer.late:
            self._complain("late", f"{timer}: {token}, cursor {self.cursor}", number)
        if token.late:
            return
        if timer.key <= self.cursor:
            self._complain("order", f"{timer} fired behind {self.cursor}", number)
        self.cursor = max(self.cursor, timer.key)
        while self._wheel and self._wheel[0] <= self.cursor:
            passed = self._timers[heappop(self._wheel)[1]]
            if passed is not timer and not passed.ends:
                self._complain("I1 no-loss", f"{passed} is passed over by {timer}", passed.number)


def number_of(head: bytes) -> int:
    return int(head[:6]) if head[:6].isdigit() else -1
