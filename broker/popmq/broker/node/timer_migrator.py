"""TimerMigrator: the master of a broker group that is drained hands its pending timers to others.

A batch at a time: one record says which timers leave and who is asked; when that is confirmed the
other group is asked until it has them; another record says that it does.  Nothing is decided here
that is not in the log: a start, or another master, goes on with the batch that it finds.
"""

import logging
import random
from collections.abc import Callable, Iterable

from popmq.broker.core.broker import Broker
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.timer.independent_reads import IndependentReads
from popmq.broker.timer.timer_queue import entry_of
from popmq.common.clock import Clock
from popmq.common.errors import PopmqError
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.record.timer_migration import MigratingTimer
from popmq.common.record.timer_token import MOVED_BIT, TimerToken
from popmq.common.settings.settings import Settings
from popmq.common.wire.controller_pb2 import BrokerAddress
from popmq.common.wire.replication_pb2 import TakeTimersRequest

logger = logging.getLogger(__name__)

BATCH = 256
BATCH_BYTES = 1 << 20  # and one message more
STAYS_MS = 10_000  # what is due so soon is fired here: it would be late on its way
ANSWER_MS = 10_000
AGAIN_MS = 200
FRESH_MS = 2_000  # a group that answered within this time is asked without a question before
PASS_MS = 60_000  # between two looks at the whole queue, for what could not leave in the first
_LOOK = 2_048  # units of the queue in one step
_PENDING_BYTES = 16 << 20
_KEPT_FREE = 10  # of timer.cancelled_limit a tenth is left to recalls
_RECORD_BYTES = 64  # of a departure, for each timer: more than that
_IN_PROCESS = "in-process"  # the address of a broker that nobody else reaches


class TimerMigrator:
    """`hear` where the others are, and `step` while this broker is its group's master."""

    def __init__(
        self,
        settings: Settings,
        *,
        open_port: Callable[[str], Port],
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._settings = settings
        self._open_port = open_port
        self._clock = clock
        self._rng = rng
        self._peers: dict[str, BrokerAddress] = {}
        self._told = False  # of them, since this drain began
        self._answered_ms: dict[str, int] = {}
        self._complained = ""
        self._turn = 0
        # Of one life of the broker, and one drain.
        self._broker: Broker | None = None
        self._origin = 0  # whose moves they are, for those who take them
        self._cold: IndependentReads
        self._at = 0  # of the timer queue: what stands before has been looked at
        self._asking = False
        self._taken = 0  # first move of the batch that the other group has
        self._due_ms = self._ask_ms = self._pass_ms = 0

    def hear(self, peers: Iterable[BrokerAddress]) -> None:
        """Where the masters of broker groups are; those that are not named stay as they were,
        but for new timers."""
        own = self._settings.broker.name
        every = list(peers)  # this group is among them, if anything is told
        self._told = self._told or bool(every)
        addresses = {
            address.broker: address
            for address in every
            if address.broker != own and address.address not in ("", _IN_PROCESS)
        }
        if addresses:
            for name in self._peers.keys() - addresses.keys():
                addresses[name] = BrokerAddress(
                    broker=name, address=self._peers[name].address, draining=True
                )
            self._peers = addresses

    def wants_peers(self, broker: Broker) -> bool:
        return broker.registry.draining or broker.timers.outgoing_timers.is_under_way

    def step(self, broker: Broker) -> int:
        """Choose a batch, ask for it, or note that it was taken; returns how much was done."""
        departures = broker.timers.outgoing_timers
        if not self.wants_peers(broker):
            departures.waits_for = ""
            self._broker = None
            return 0
        if broker is not self._broker:  # another life, or another drain
            self._begin(broker)
        if departures.is_under_way:
            return self._step_batch(broker)
        departures.waits_for = ""
        if not broker.timers.state.pending_total or self._now_ms() < self._due_ms:
            return 0
        if (target := self._choose_target(broker)) is None:
            return 0
        if (limit := self._room(broker)) < 1:
            return 0
        return self._cold.run("leave", lambda: self._leave(broker, target, limit))

    # -- a batch that is on its way

    def _step_batch(self, broker: Broker) -> int:
        departures = broker.timers.outgoing_timers
        if self._taken == departures.first:
            if self._refused_by_disk(broker):
                return 0
            departures.finish_migration()
            departures.waits_for = ""
            self._taken = 0
            return 1
        if self._asking or not departures.is_confirmed or self._now_ms() < self._ask_ms:
            return 0
        return self._cold.run("ask", lambda: self._ask_batch(broker))

    def _ask_batch(self, broker: Broker) -> int:
        departures, target = broker.timers.outgoing_timers, broker.timers.outgoing_timers.target
        if target not in self._peers:
            departures.waits_for = (
                f"where broker group {target} is, which {len(departures.leaving)} timers are on "
                "their way to, no controller says"
            )
            return 0
        leaving = departures.leaving
        if max(entry.position for entry in leaving) >= broker.store.confirmed:
            return 0  # retention has just moved one: it is confirmed soon
        units = [QueueUnit(entry.position, entry.size, 0) for entry in leaving]
        messages = broker.store.reader.read(units, wait=False)
        request = self._request(departures.origin)
        for move, (timer, message) in enumerate(
            zip(leaving, messages, strict=True), departures.first
        ):
            token = None if isinstance(message, DamagedMessage) else message.any_token
            if isinstance(message, DamagedMessage) or not isinstance(token, TimerToken):
                logger.error(
                    "timer lost", extra={"position": timer.position, "due_ms": timer.due_ms}
                )
                continue
            topic = broker.registry.topic_by_id(timer.topic_id)
            request.timers.add(
                move=move,
                topic_id=timer.topic_id,
                topic=topic.name if topic is not None else "",
                queue_id=token.queue_id,
                tag_hash=token.tag_hash,
                due_ms=timer.due_ms,
                head=message.head,
                properties=message.properties,
            )
        first = departures.first

        def taken() -> None:
            self._taken = first

        self._ask(broker, target, request, taken)
        return 1

    def _request(self, origin: int) -> TakeTimersRequest:
        return TakeTimersRequest(
            cluster=self._settings.cluster.name,
            group=self._settings.broker.name,
            origin=origin,
        )

    def _ask(
        self, broker: Broker, target: str, request: TakeTimersRequest, then: Callable[[], None]
    ) -> None:
        """What the answer changes in the log, the next step writes."""
        self._asking = True

        def answered(answer: bytes | PopmqError) -> None:
            if broker is not self._broker:
                return
            self._asking = False
            now_ms = self._now_ms()
            if isinstance(answer, PopmqError):
                self._ask_ms = now_ms + AGAIN_MS
                self._answered_ms.pop(target, None)
                self._complain(broker, f"broker group {target} takes no timers: {answer}")
                return
            self._complained = ""
            self._answered_ms[target] = now_ms
            then()

        port = self._open_port(self._peers[target].address)
        port.request(Kind.TAKE_TIMERS, request.SerializeToString(), ANSWER_MS, answered)

    # -- the next batch

    def _choose_target(self, broker: Broker) -> str | None:
        """One that answers, each in turn. A batch is its own from the moment it is named."""
        names = sorted(name for name, address in self._peers.items() if not address.draining)
        if not names:
            broker.timers.outgoing_timers.waits_for = (
                "no other broker group takes them: they stay until their time"
                if self._told
                else "no controller has said yet where the other broker groups are"
            )
            return None
        name = names[self._turn % len(names)]
        now_ms = self._now_ms()
        if now_ms - self._answered_ms.get(name, -FRESH_MS) < FRESH_MS:
            return name
        if self._complained:
            broker.timers.outgoing_timers.waits_for = self._complained
        if not self._asking and now_ms >= self._ask_ms:
            self._turn += 1  # whoever does not answer is passed over
            back = self._turn - 1

            def answers() -> None:
                self._turn = back

            self._ask(broker, name, self._request(self._origin), answers)
        return None

    def _room(self, broker: Broker) -> int:
        """How many may leave now."""
        limit = self._settings.timer.cancelled_limit
        room = limit - limit // _KEPT_FREE - len(broker.timers.state.cancelled)
        if room < 1:
            broker.timers.outgoing_timers.waits_for = (
                f"{len(broker.timers.state.cancelled)} timers that were moved or recalled are "
                f"remembered, and the limit is {limit} (timer.cancelled_limit), of which a tenth "
                "is left to recalls: raise it, or the others stay until their time"
            )
        if self._refused_by_disk(broker) or broker.store.pending_bytes > _PENDING_BYTES:
            return 0
        fitting = self._settings.store.segment_bytes // _RECORD_BYTES
        return min(room, BATCH, self._settings.timer.moves_per_second, fitting)

    def _leave(self, broker: Broker, target: str, limit: int) -> int:
        timers = self._next_timers(broker, limit)
        if timers:
            broker.timers.outgoing_timers.start_migration(target, self._origin, timers)
            pace_ms = 1_000 * len(timers) // self._settings.timer.moves_per_second
            self._due_ms = self._now_ms() + pace_ms
            self._turn += 1
            return len(timers)
        if self._at < broker.timers.service.queue.count:
            return 1
        if self._now_ms() >= self._pass_ms:
            self._pass_ms = self._now_ms() + PASS_MS
            self._at = 0
        return 0

    def _next_timers(self, broker: Broker, limit: int) -> list[MigratingTimer]:
        """Pending timers of the next piece of the queue, in its order. ColdRead: call again."""
        timers, queue = broker.timers, broker.timers.service.queue
        # Of a body that retention moved, the newer record stands further behind.
        begin = max(self._at, queue.queue.min_offset, timers.bodies.passed)
        look = min(_LOOK, queue.count - begin)
        units = queue.queue.units(begin, look, wait=False) if look > 0 else ()
        chosen: list[tuple[int, QueueUnit]] = []
        size, end = 0, begin
        for offset, unit in enumerate(units, begin):
            due_ms, moved = unit.tag_hash & ~MOVED_BIT, unit.tag_hash & MOVED_BIT
            # Which timer a body that was moved belongs to, only its record says.
            if moved or timers.state.is_pending(due_ms, unit.position, offset):
                if chosen and (size + unit.size > BATCH_BYTES or len(chosen) == limit):
                    break
                chosen.append((offset, unit))
                size += unit.size
            end = offset + 1
        messages = broker.store.reader.read([unit for _, unit in chosen], wait=False)
        self._at = max(end, begin)
        soon_ms = self._clock.wall_ms() + STAYS_MS
        found_timers: dict[int, MigratingTimer] = {}
        for (offset, unit), message in zip(chosen, messages, strict=True):
            timer, moved_body = entry_of(offset, unit, message)[1:]
            if timer is None or timer.due_ms <= soon_ms:
                continue
            if timers.state.is_pending(*timer.key, offset, moved=moved_body):
                found_timers[timer.identity] = MigratingTimer(
                    timer.due_ms, timer.identity, timer.position, timer.size, timer.topic_id
                )
        return list(found_timers.values())

    # -- inside

    def _begin(self, broker: Broker) -> None:
        """Under another origin than any life before, also than those that a backup of this log does
        not know of: nothing new is taken for a move that was made already."""
        self._broker = broker
        self._origin = self._rng.getrandbits(63) | 1
        self._cold = IndependentReads(broker.store)
        self._at = self._taken = 0
        self._asking = self._told = False
        self._due_ms = self._ask_ms = self._pass_ms = 0

    def _refused_by_disk(self, broker: Broker) -> bool:
        try:
            broker.store.guard.check_write()
        except PopmqError as full:
            broker.timers.outgoing_timers.waits_for = str(full)
            return True
        return False

    def _complain(self, broker: Broker, reason: str) -> None:
        """Once for each reason."""
        broker.timers.outgoing_timers.waits_for = reason
        if reason != self._complained:
            self._complained = reason
            logger.warning("timers are not moved", extra={"reason": reason})

    def _now_ms(self) -> int:
        return self._clock.boot_ms()
