"""Requests of the simulator's clients: asked, answered once, or lost with the connection.

Also the administrator, who makes and deletes topics and groups.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.harness.sometimes import Sometimes, StateCounts
from popmq.testing.oracle.client_history import Held, ReceiveCall, ResourceIncarnation
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.sim.equal_ids import EqualIds
from popmq.testing.sim.simulated_broker import SimulatedBroker

BACK_OFF_MS = 500
_ADMIN_OK = (Code.OK, Code.BAD_REQUEST, Code.TOPIC_NOT_FOUND, Code.CONSUMER_GROUP_NOT_FOUND)


@dataclass(slots=True, eq=False)
class _Request:
    on_result: Callable[[bytes | PopmqError], None]
    lost: Callable[[], None]
    pop: ReceiveCall | None = None
    id: int = 0
    left: bool = False  # its client is gone, and the broker will hear of that


class Requests:
    def __init__(
        self,
        machine: SimulatedBroker,
        oracle: Oracle,
        rng: random.Random,
        tally: StateCounts,
        note: Callable[[str], None],
    ) -> None:
        self._machine = machine
        self._oracle = oracle
        self._rng = rng
        self._tally = tally
        self._note = note
        self._open: dict[int, _Request] = {}
        self._crossed: list[_Request] = []  # answered after their clients had left
        self._number = 0
        self.ids = EqualIds(0)
        self.uniform = 0  # size of every body; 0: sizes vary
        # None: a create or delete was not answered.
        self.topics: dict[str, ResourceIncarnation | None] = {}
        self.groups: dict[str, ResourceIncarnation | None] = {}
        self.held: list[Held] = []
        self.answered = 0
        self._names = 0  # attempt ids so far
        self._named: list[tuple[str, list[Held], int]] = []  # what they gave, and in which era
        self.proxy_died_at = 0  # event number
        self.quiet = 0  # receives answered with nothing, errors not counted

    # -- connections

    def crashed(self) -> None:
        """No open request will ever be answered."""
        waiting, self._open = [*self._open.values(), *self._crossed], {}
        self._crossed = []
        for request in waiting:
            request.lost()
        self._oracle.ended()

    def drop_replies(self, numbers: list[int]) -> None:
        """A proxy ends: its requests are not answered, and whoever waited there is gone."""
        for number in numbers:
            self._cancel(self._open.pop(number))

    def leave(self) -> None:
        """The client of a receive goes away; the broker hears of it now, or after its answer."""
        asking = [
            number for number, request in self._open.items() if request.pop and not request.left
        ]
        if not asking:
            return
        number = self._rng.choice((asking[-1], self._rng.choice(asking)))
        self._tally.hit(Sometimes.CANCELLED)
        if self._rng.random() < 0.5:
            self._note(f"cancel {number}")
            self._cancel(self._open.pop(number))
        else:
            self._note(f"{number} is left alone")
            self._open[number].left = True

    def hear_of_leaving(self) -> None:
        """A cancel reaches the broker, before its answer or after it."""
        for number in [number for number, request in self._open.items() if request.left]:
            if self._rng.random() < 0.5:
                self._note(f"cancel {number}")
                self._cancel(self._open.pop(number))
        crossed, self._crossed = self._crossed, []
        for request in crossed:
            self._tally.hit(Sometimes.CROSSED)
            self._cancel(request)

    def _cancel(self, request: _Request) -> None:
        self._oracle.at += 1
        self._oracle.log_ms = self._machine.log_ms
        self._machine.server.cancel(request.id)
        if request.pop is not None:
            self._oracle.pop_left(request.pop)
        else:
            request.lost()

    @property
    def asked(self) -> list[int]:
        """Requests that are not answered yet."""
        return list(self._open)

    @property
    def waiting(self) -> list[ReceiveCall]:
        """Receives that may wait, have no answer, and whose clients are there."""
        asked = [call for call in self._open.values() if not call.left]
        return [call.pop for call in asked if call.pop is not None and call.pop.poll_ms]

    def dismissed(self) -> None:
        """The broker stops cleanly: whoever waits is sent home."""
        for request in self._open.values():
            if request.pop is not None:
                request.pop.dismissed = True

    def _ask(
        self,
        what: str,
        kind: Kind,
        body: bytes,
        hear: Callable[[bytes | PopmqError], None],
        *,
        lost: Callable[[], None] = lambda: None,
        pop: ReceiveCall | None = None,
    ) -> None:
        self._number += 1
        number = self._number
        request = self._open[number] = _Request(hear, lost, pop)
        self._note(f"{number} {what}")

        def on_reply(answer: bytes | PopmqError) -> None:
            if self._open.pop(number, None) is None:
                return
            if request.left:
                self._note(f"{number} is answered, and nobody is there")
                self._crossed.append(request)
                if request.pop is not None:
                    self._oracle.pop_crossed(request.pop)
                return
            self._oracle.at += 1
            self._oracle.now_ms = self._machine.clock.boot_ms()
            self._oracle.log_ms = self._machine.log_ms
            self.answered += 1
            if isinstance(answer, PopmqError):
                self._note(f"{number} -> {answer.code.name}")
                if answer.code == Code.INTERNAL_ERROR and not self._oracle.log_lost:
                    self._oracle.report_violation("I0 answers", f"{what}: {answer}")
            try:
                hear(answer)
            except AssertionError as error:  # the broker would only log it
                self._oracle.report_violation("I0 broken", f"a client: {error}")

        self._oracle.at += 1
        try:
            request.id = self._machine.server.request(kind, body, 10_000, on_reply)
        except OSError as error:
            self._machine.failed = self._machine.failed or error

    # -- administration

    def make_topic(
        self, name: str, queues: int, *, retention_ms: int = 0, fifo: bool = False
    ) -> None:
        place = ResourceIncarnation(name, fifo=fifo)
        kind = "mixed" if fifo else "normal"
        topic = pb.Topic(name=name, queues=queues, type=kind, retention_ms=retention_ms)
        body = pb.CreateTopicRequest(topic=topic).SerializeToString()
        self._admin(Kind.CREATE_TOPIC, body, self.topics, name, place)

    def make_group(
        self,
        name: str,
        max_attempts: int,
        *,
        newest: bool = False,
        buffered: bool = False,
        fifo: bool = False,
    ) -> None:
        place = ResourceIncarnation(
            name, max_attempts=max_attempts, from_newest=newest, buffered=buffered
        )
        place.fifo, place.back_off_ms = fifo, BACK_OFF_MS
        group = pb.Group(
            name=name,
            type="fifo" if fifo else "normal",
            max_attempts=max_attempts,
            back_off_ms=[BACK_OFF_MS],
            start_at="newest" if newest else "oldest",
            check_points="buffered" if buffered else "durable",
        )
        body = pb.CreateGroupRequest(group=group).SerializeToString()
        self._admin(Kind.CREATE_GROUP, body, self.groups, name, place)

    def drop_topic(self, name: str) -> None:
        body = pb.DeleteTopicRequest(name=name).SerializeToString()
        self._admin(Kind.DELETE_TOPIC, body, self.topics, name, None)

    def drop_group(self, name: str) -> None:
        body = pb.DeleteGroupRequest(name=name).SerializeToString()
        self._admin(Kind.DELETE_GROUP, body, self.groups, name, None)

    def _admin(
        self,
        kind: Kind,
        body: bytes,
        places: dict[str, ResourceIncarnation | None],
        name: str,
        new: ResourceIncarnation | None,
    ) -> None:
        """Create (`new`) or delete; while the answer is out, nobody uses the place."""
        old = places.get(name)
        if old is not None:
            old.gone = 1
        places[name] = None

        def hear(answer: bytes | PopmqError) -> None:
            if isinstance(answer, PopmqError):
                if answer.code not in _ADMIN_OK:
                    self._oracle.report_violation("I0 answers", f"{kind.name} {name}: {answer}")
                if new is None:
                    places.pop(name, None)
            elif new is not None:
                places[name] = new
            else:
                places.pop(name, None)
                if old is not None:
                    old.gone = 2

        self._ask(f"{kind.name.lower()} {name}", kind, body, hear)

    def _check_known(
        self,
        topic: ResourceIncarnation,
        answer: PopmqError,
        group: ResourceIncarnation | None = None,
    ) -> None:
        """A topic or group that lasts is never answered as missing."""
        missing_topic = answer.code == Code.TOPIC_NOT_FOUND and not topic.gone
        missing_group = (
            answer.code == Code.CONSUMER_GROUP_NOT_FOUND and group is not None and not group.gone
        )
        if (missing_topic or missing_group) and not self._oracle.log_lost:
            self._oracle.report_violation("I1 no-loss", f"created, but: {answer}")

    def count(self, what: Sometimes, times: int) -> None:
        self._tally.hit(what, times)
