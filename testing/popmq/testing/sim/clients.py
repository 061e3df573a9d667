"""Clients of the simulator: producers and consumers, all behind one pair of dice.

They keep what they were told and tell the oracle; nothing in here looks into the broker.
"""

from collections.abc import Callable

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.testing.harness.core_broker import pop as encode_pop
from popmq.testing.harness.sometimes import Sometimes
from popmq.testing.oracle.client_history import GroupReader, Held, ReceiveCall
from popmq.testing.oracle.false_empty import popped_empty
from popmq.testing.sim.producers import Producers

INVISIBLE_MS = (1, 150, 1_000, 3_000, 8_000)
MAX_INVISIBLE_MS = max(INVISIBLE_MS)
BRIEF = "brief"  # a topic with a retention of its own
LONG_MS = (5_400_000, 10_800_000)  # longer than messages are kept, where they expire


def _sql(tags: tuple[str, ...]) -> str:
    return "TAGS IN (" + ", ".join(f"'{tag}'" for tag in tags) + ")"


class SimClients(Producers):
    # -- consumers

    def receive(
        self,
        reader: GroupReader,
        *,
        limit: int = 32,
        invisible_ms: int = 60_000,
        poll_ms: int = 0,
        queue_id: int = -1,
        client_id: str = "",
        attempt_id: str = "",
        repeats: bool = False,
        then: Callable[[list[Held]], None] = lambda held: None,
    ) -> None:
        """With a `client_id` as a push consumer, whose deliveries last as long as it lives."""
        oracle, machine = self._oracle, self._machine
        now_ms = machine.clock.boot_ms()
        pop = ReceiveCall(
            reader, reader.tags, queue_id, invisible_ms, poll_ms, oracle.at, now_ms, machine.log_ms
        )
        pop.client_id, pop.attempt_id = client_id, attempt_id
        pop.lost_before = reader.lost_pops
        pop.repeats = repeats
        if repeats:
            pop.invisible_ms = 0  # what it is given again was made by an earlier one
        if client_id:
            oracle.clients.heard(client_id, machine.log_ms)
        reader.open_pops += 1

        def hear(answer: bytes | PopmqError) -> None:
            reader.open_pops -= 1
            if isinstance(answer, PopmqError):
                limit_hit = answer.code == Code.TOO_MANY_REQUESTS
                self._tally.hit(Sometimes.IN_FLIGHT_LIMIT, int(limit_hit))
                if not limit_hit:
                    self._check_known(reader.topic, answer, reader.group)
                return
            deliveries = hop.decode_pop_reply(answer).deliveries
            before = {life.held for life in reader.lives.values()}
            got = [
                held
                for delivery in deliveries
                if (held := self._delivered(pop, delivery)) is not None
            ]
            again = [held for held in got if held in before]
            self._note(f"got {[(h.sent.number, h.attempt) for h in got]}")
            if not deliveries:
                self.quiet += 1
                popped_empty(oracle, pop)
                waited = now_ms + poll_ms <= oracle.now_ms and not pop.dismissed
                self._tally.hit(Sometimes.POLL_TIMEOUT, int(poll_ms > 0 and waited))
            self._tally.hit(Sometimes.WOKEN, int(bool(deliveries) and oracle.now_ms > now_ms))
            oracle.order.reply(pop, got, again)
            self.held += [held for held in got if held not in again]
            self._tally.hit(Sometimes.GIVEN_AGAIN, len(again))
            then(got)

        sql = bool(reader.tags) and self._number % 2 > 0  # the same filter in other words
        what = f"pop {reader.topic.name} {reader.group.name} {limit} {invisible_ms} {poll_ms}"
        body = encode_pop(
            reader.topic.name,
            reader.group.name,
            limit=limit,
            invisible_ms=invisible_ms,
            poll_ms=poll_ms,
            expression=_sql(reader.tags) if sql else "||".join(reader.tags),
            sql=sql,
            queue_id=queue_id,
            auto_renew=bool(client_id),
            client_id=client_id or "a-client",
            attempt_id=attempt_id,
        )
        self._ask(what, Kind.POP, body, hear, lost=lambda: oracle.pop_lost(pop), pop=pop)

    def _delivered(self, pop: ReceiveCall, delivery: hop.Delivery) -> Held | None:
        digits = delivery.head[:6]
        number = int(digits) if digits.isdigit() else -1
        life = pop.reader.lives.get(number)
        before = life.attempt if life else 0
        self._tally.hit(Sometimes.REVIVED, int(before > 0))
        self._tally.hit(Sometimes.LOST_REPLY, int(delivery.attempt > before + 1))
        kept = life is not None and life.held is not None and life.held.renewed_by
        self._tally.hit(Sometimes.FELL_SILENT, int(bool(kept) and delivery.attempt > before > 0))
        return self._oracle.delivered(
            pop, number, delivery.head, delivery.properties, delivery.attempt, delivery.handle
        )

    # -- acks

    def ack(self, some: list[Held], *, then: Callable[[], None] = lambda: None) -> None:
        """Ack deliveries of one reader in one request."""
        oracle = self._oracle
        reader = some[0].reader
        reasons = [oracle.must_refuse(held) for held in some]

        def hear(answer: bytes | PopmqError) -> None:
            if isinstance(answer, PopmqError):
                lost()
                return
            results = hop.decode_ack_reply(answer)
            for held, refuse, result in zip(some, reasons, results, strict=True):
                held.life.ending -= 1
                if result.code in (Code.OK, Code.INVALID_RECEIPT_HANDLE):
                    self._ack_heard(held, refuse, result.code == Code.OK)
                else:
                    self._tally.hit(Sometimes.ACK_REFUSED)
            then()

        def lost() -> None:
            self._tally.hit(Sometimes.ACK_LOST)
            for held in some:
                held.life.ending -= 1
                held.acked = held.acked or 1
                if held.life.loose or held.chain == held.life.chain:
                    held.life.acked = held.life.acked or 1

        for held in some:
            held.life.ending += 1
        names = ",".join(f"{held.sent.number}/{held.attempt}" for held in some)
        body = hop.encode_ack(
            hop.AckRequest(reader.topic.name, reader.group.name, [held.handle for held in some])
        )
        self._ask(f"ack {reader.group.name} {names}", Kind.ACK, body, hear, lost=lost)

    def _ack_heard(self, held: Held, refuse: str, ok: bool) -> None:
        tally, late = self._tally, self._oracle.log_ms - held.asked_log_ms > held.invisible_ms
        tally.hit(Sometimes.REPEATED_ACK, int(ok and held.acked == 2))
        tally.hit(Sometimes.LATE_ACK, int(ok and held.acked == 0 and late))
        tally.hit(Sometimes.SUPERSEDED, int(not ok and refuse == "superseded"))
        tally.hit(Sometimes.STALE, int(not ok and refuse == "revived"))
        tally.hit(Sometimes.AFTER_RESET, int(not ok and refuse == "reset"))
        tally.hit(Sometimes.AFTER_REJECT, int(not ok and refuse == "rejected"))
        tally.hit(Sometimes.OTHER_PROXY, int(ok and held.received_at < self.proxy_died_at))
        self._note(f"ack {held.sent.number}/{held.attempt} {'OK' if ok else 'refused'}")
        self._oracle.acked(held, ok, refuse)

    def ack_wrongly(self, held: Held) -> None:
        """With the name of another group, or a handle with one character changed."""
        forged = self._rng.random() < 0.5
        handle = held.handle
        others = [g for g in self.groups.values() if g and g is not held.reader.group]
        group = held.reader.group.name if forged else self._rng.choice(others).name
        if forged:
            at = self._rng.randrange(len(handle) - 1)
            other = b"A" if handle[at : at + 1] != b"A" else b"B"
            handle = handle[:at] + other + handle[at + 1 :]

        def hear(answer: bytes | PopmqError) -> None:
            if isinstance(answer, PopmqError):
                return
            (result,) = hop.decode_ack_reply(answer)
            self._tally.hit(Sometimes.FORGED if forged else Sometimes.FOREIGN)
            if result.code == Code.OK:
                kind = "forged" if forged else "foreign"
                self._oracle.report_violation(
                    "I6 stale-handle", f"OK for a {kind} handle", held.life
                )

        body = hop.encode_ack(hop.AckRequest(held.reader.topic.name, group, [handle]))
        self._ask(f"ack wrongly {held.sent.number} as {group}", Kind.ACK, body, hear)

    def change(self, held: Held, invisible_ms: int) -> None:
        oracle, machine = self._oracle, self._machine
        why = oracle.must_refuse(held) or ("acked" if held.acked == 2 else "")
        asked = ReceiveCall(
            held.reader,
            (),
            -1,
            invisible_ms,
            0,
            oracle.at,
            machine.clock.boot_ms(),
            machine.log_ms,
        )

        reader = held.reader
        held.changes_open += 1

        def hear(answer: bytes | PopmqError) -> None:
            held.changes_open -= 1
            if isinstance(answer, PopmqError):
                if answer.code == Code.INVALID_RECEIPT_HANDLE:
                    oracle.change_refused(held)
            else:
                self._note(f"changed {held.sent.number}/{held.attempt}")
                away_ms = max(invisible_ms, reader.group.back_off_ms if held.push else 0)
                self.held.append(oracle.changed(held, answer, away_ms, asked, why))

        def lost() -> None:
            self._tally.hit(Sometimes.CHANGE_LOST)
            held.changes_open -= 1
            held.superseded = held.superseded or 1

        body = hop.encode_change(
            hop.ChangeRequest(reader.topic.name, reader.group.name, held.handle, invisible_ms)
        )
        what = f"change {reader.group.name} {held.sent.number}/{held.attempt} {invisible_ms}"
        self._ask(what, Kind.CHANGE, body, hear, lost=lost)

    # -- dead letters

    def read_all(self, reader: GroupReader, settle: Callable[[], None]) -> list[bytes]:
        """The heads of everything in a dead-letter topic; none when there is no such topic."""
        heads: list[bytes] = []
        more = True

        topic, group = reader.topic.name, reader.group.name

        def hear(answer: bytes | PopmqError) -> None:
            nonlocal more
            if isinstance(answer, PopmqError):
                return
            deliveries = hop.decode_pop_reply(answer).deliveries
            heads.extend(delivery.head for delivery in deliveries)
            more = bool(deliveries)
            if deliveries:
                acks = hop.AckRequest(topic, group, [delivery.handle for delivery in deliveries])
                self._ask(f"ack {topic}", Kind.ACK, hop.encode_ack(acks), lambda answer: None)

        while more:
            more = False
            self._ask(f"pop {topic}", Kind.POP, encode_pop(topic, group), hear)
            settle()
        return heads
