"""Operators: the clients of a run, with all that happens to messages besides receive and ack.

Rejects, receives that are repeated, push consumers that live and fall silent, proxies that end;
offsets reset, dead letters sent back, parked message groups resumed, skipped and given up.
"""

from collections.abc import Callable

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.harness.sometimes import Sometimes
from popmq.testing.oracle import delivery_chains as chains
from popmq.testing.oracle.client_history import (
    GroupReader,
    Held,
    MessageHistory,
    ResourceIncarnation,
)
from popmq.testing.sim.clients import INVISIBLE_MS, SimClients

PUSH_CLIENTS = ("c1", "c2")
_ACTIONS = ("resume", "resume", "skip", "dead-letter")
_REFUSALS = (Code.NOT_FOUND, Code.TOPIC_NOT_FOUND, Code.CONSUMER_GROUP_NOT_FOUND)


class Operators(SimClients):
    _redrives = 0  # that were asked for
    _lost_resets = 0  # whose answers never came

    # -- consumers

    def reject(self, held: Held) -> None:
        """The consumer gives the message up."""
        oracle, tally, life = self._oracle, self._tally, held.life
        refuse = oracle.must_refuse(held) or ("acked" if held.acked == 2 else "")
        again = life.rejected == 2
        life.ending += 1

        def hear(answer: bytes | PopmqError) -> None:
            life.ending -= 1
            if isinstance(answer, PopmqError):
                return
            (result,) = hop.decode_ack_reply(answer)
            ok = result.code == Code.OK
            self._note(f"reject {held.sent.number}/{held.attempt} {'OK' if ok else 'refused'}")
            if ok or result.code == Code.INVALID_RECEIPT_HANDLE:
                tally.hit(Sometimes.REJECTED, int(ok))
                tally.hit(Sometimes.REJECTED_TWICE, int(ok and again))
                oracle.rejected(held, ok, "" if refuse == "rejected" else refuse)

        def lost() -> None:
            life.ending -= 1
            if life.loose or held.chain == life.chain:
                life.rejected = life.rejected or 1

        reader = held.reader
        body = hop.encode_ack(hop.AckRequest(reader.topic.name, reader.group.name, [held.handle]))
        what = f"reject {reader.group.name} {held.sent.number}/{held.attempt}"
        self._ask(what, Kind.REJECT, body, hear, lost=lost)

    def receive_named(self, reader: GroupReader, *, limit: int, invisible_ms: int) -> None:
        """A receive with an attempt id, that may be repeated."""
        self._names += 1
        name = f"attempt-{self._names}"

        def then(held: list[Held]) -> None:
            if held:
                self._named.append((name, held, self._oracle.era))
                del self._named[:-6]

        self.receive(reader, limit=limit, invisible_ms=invisible_ms, attempt_id=name, then=then)

    def repeat(self) -> None:
        """The same receive once more: it gives what it gave and what is not over."""
        if not self._named:
            return
        name, given, era = self._rng.choice(self._named)
        oracle, reader = self._oracle, given[0].reader
        handles = {held.handle for held in given}

        def then(got: list[Held]) -> None:
            # What was there when it was asked for, and is there now.
            requested = [held for held in given if held in fresh and self._still_held(held)]
            found_handles = {held.handle for held in got}
            for held in requested:
                if held.handle not in found_handles:
                    what = f"message {held.sent.number} is not in the repeated receive {name}"
                    oracle.report_violation("I7 same receive", what, held.life)
            if requested and not found_handles <= handles:
                oracle.report_violation("I7 same receive", f"{name} gave others beside the same")
            self._tally.hit(Sometimes.REPEATED_LATER, int(bool(requested) and era < oracle.era))

        fresh = [held for held in given if self._still_held(held)]
        if reader.alive:
            invisible_ms = self._rng.choice(INVISIBLE_MS)
            self.receive(
                reader, invisible_ms=invisible_ms, attempt_id=name, repeats=True, then=then
            )

    def _still_held(self, held: Held) -> bool:
        steady = not held.life.acked and not held.life.ending and held.life.held is held
        return steady and self._oracle.must_accept(held)

    def heard(self) -> None:
        """A proxy reports one of the push consumers; now and then as one that said good-bye."""
        client_id = self._rng.choice(PUSH_CLIENTS)
        self.report(client_id, gone=self._rng.random() < 0.3)

    def report(self, client_id: str, *, gone: bool) -> None:
        lives = self._oracle.clients
        if gone:
            lives.gone(client_id, self._machine.log_ms)
            self._tally.hit(Sometimes.SAID_GOOD_BYE)
        else:
            lives.heard(client_id, self._machine.log_ms)
        ids = [client_id]
        report = hop.ClientsReport((), ids) if gone else hop.ClientsReport(ids, ())
        what = f"{'gone' if gone else 'heard'} {client_id}"
        self._ask(what, Kind.CLIENTS, hop.encode_clients(report), lambda answer: None)

    def proxy_dies(self) -> None:
        """Some of the open requests were its own; what was received through it is acked through
        another one."""
        lost = [number for number in self.asked if self._rng.random() < 0.5]
        self._note(f"a proxy dies with {lost}")
        self.proxy_died_at = self._oracle.at
        self._tally.hit(Sometimes.PROXY_DIED, int(bool(lost)))
        self.drop_replies(lost)

    # -- operators

    def _reset_request(self, reader: GroupReader, to: str) -> pb.ResetOffsetRequest:
        rng = self._rng
        request = pb.ResetOffsetRequest(group=reader.group.name, topic=reader.topic.name)
        request.skip_retries = rng.random() < 0.5
        match to or rng.choice(("oldest", "newest", "offset", "time")):
            case "oldest":
                request.oldest = True
            case "newest":
                request.newest = True
            case "time":
                request.stored_ms = self._machine.clock.wall_ms() - rng.choice((0, 1_000, 60_000))
            case _:
                request.offset, request.queue_id = rng.choice((0, 1, 3)), 0
                request.ClearField("skip_retries")
        return request

    def reset(self, reader: GroupReader, before: Callable[[], None], to: str = "") -> None:
        """To one of oldest, newest and an offset; `before` is called first."""
        oracle = self._oracle
        topic, group = reader.topic, reader.group
        same = [
            reader for reader in oracle.readers if reader.group is group and reader.topic is topic
        ]
        request = self._reset_request(reader, to)
        skips, whole = request.skip_retries, not request.HasField("queue_id")
        redrives, lost_resets = self._redrives, self._lost_resets
        lost_before = [
            reader.lost_pops for reader in same
        ]  # what is lost from now on may be behind it

        def hear(answer: bytes | PopmqError) -> None:
            closed()
            if isinstance(answer, PopmqError):
                return  # an offset that the queue does not have, or a full disk
            done = pb.ResetOffsetReply.FromString(answer).queues
            offsets = {
                reset_queue.queue_id: reset_queue.after
                for reset_queue in done
                if reset_queue.topic == topic.name
            }
            self._note(f"reset {group.name} {topic.name} {offsets}")
            if request.HasField("stored_ms"):
                self._tally.hit(Sometimes.RESET_TO_TIME)
                self._check_time(topic, request.stored_ms, offsets)
            self._tally.hit(Sometimes.FIFO_RESET if group.fifo else Sometimes.RESET)
            self._tally.hit(
                Sometimes.RESET_IN_FLIGHT, sum(reset_queue.in_flight > 0 for reset_queue in done)
            )
            if redrives != self._redrives or lost_resets != self._lost_resets:
                # Letters that went back meanwhile, and a reset of which nobody heard, stand before
                # or behind it: nobody can tell.
                for peer in same:
                    chains.reset_lost(peer, oracle.messages)
                return
            for peer, lost_pops in zip(same, lost_before, strict=True):
                chains.reset_done(
                    peer,
                    oracle.messages,
                    offsets,
                    lost_before=lost_pops,
                    whole=whole,
                    retries_left=not skips and not group.fifo,
                    parked_left=not skips and group.fifo and oracle.parks,
                )

        def lost() -> None:
            closed()
            self._lost_resets += 1
            for peer in same:
                chains.reset_lost(peer, oracle.messages)

        def closed() -> None:
            for peer in same:
                peer.resets_open -= 1
                peer.lost_at = oracle.at

        before()
        for peer in same:
            peer.resets_open += 1
            peer.lost_at = peer.reset_at = oracle.at
        target = request.WhichOneof("to")
        what = f"reset {group.name} {topic.name} to {target}{' skips retries' * skips}"
        body = request.SerializeToString()
        self._ask(what, Kind.RESET_OFFSET, body, hear, lost=lost)

    def _check_time(
        self, topic: ResourceIncarnation, stored_ms: int, offsets: dict[int, int]
    ) -> None:
        """What was sent at that time or later is not passed over, if the clock never went back."""
        if self._machine.clock_went_back:
            return
        for sent in self._oracle.messages:
            passed = 0 <= sent.offset < offsets.get(sent.queue_id, 0)
            if sent.topic is topic and passed and sent.asked_wall_ms >= stored_ms:
                what = f"a reset to {stored_ms} passed over message {sent.number}"
                self._oracle.report_violation("reset", f"{what}, sent at {sent.asked_wall_ms}")

    def redrive(self, group: str, then: Callable[[], None] = lambda: None) -> None:
        """Send its dead letters back."""
        oracle = self._oracle
        self._redrives += 1
        readers = [reader for reader in oracle.readers if reader.group.name == group]
        in_order = [reader for reader in readers if reader.group.fifo]
        oracle.copying += in_order
        chains.copied_behind(in_order, oracle.readers, oracle.messages)
        chains.redrive_asked(readers, oracle.messages)

        def over() -> None:
            """Until now more of them may have become letters, and were sent back too."""
            chains.copied_behind(in_order, oracle.readers, oracle.messages)
            for reader in in_order:
                oracle.copying.remove(reader)

        def hear(answer: bytes | PopmqError) -> None:
            over()
            if isinstance(answer, PopmqError):
                return
            for done in pb.RedriveReply.FromString(answer).progress:
                self._note(f"redriven {done.redriven} of {group}, {done.already} before")
                self._tally.hit(Sometimes.REDRIVEN, done.redriven)
                self._tally.hit(Sometimes.FIFO_REDRIVEN, done.redriven * bool(in_order))
                self._tally.hit(Sometimes.REDRIVEN_BEFORE, done.already)
            then()

        body = pb.RedriveRequest(group=group).SerializeToString()
        self._ask(f"redrive {group}", Kind.REDRIVE, body, hear, lost=over)

    def letters(self, group: str, hear: Callable[[list[pb.DeadLetter]], None]) -> None:
        """What `popmq dlq` shows of the group's dead letters."""

        def told(answer: bytes | PopmqError) -> None:
            if not isinstance(answer, PopmqError):
                hear(list(pb.ListDeadLettersReply.FromString(answer).letters))

        body = pb.ListDeadLettersRequest(group=group, bodies=True).SerializeToString()
        self._ask(f"letters {group}", Kind.LIST_DEAD_LETTERS, body, told)

    def unpark(self, reader: GroupReader, key: bytes, action: str = "") -> None:
        """Say what is to become of a message group, whether it is parked or not."""
        action = action or self._rng.choice(_ACTIONS)
        oracle, tally = self._oracle, self._tally
        if action != "resume":
            for sent in oracle.messages:
                if sent.topic is reader.topic and sent.key == key:
                    reader.lives.setdefault(sent.number, MessageHistory()).resolved_at = oracle.at

        def hear(answer: bytes | PopmqError) -> None:
            if isinstance(answer, PopmqError):
                if answer.code not in (*_REFUSALS, Code.TOO_MANY_REQUESTS) and not oracle.log_lost:
                    oracle.report_violation("I0 answers", f"{action} {key!r}: {answer}")
                return
            match action:
                case "resume":
                    tally.hit(Sometimes.RESUMED)
                case "skip":
                    tally.hit(Sometimes.SKIPPED)
                case _:
                    tally.hit(Sometimes.GIVEN_UP)

        request = pb.UnparkRequest(
            group=reader.group.name, topic=reader.topic.name, key=key.decode(), action=action
        )
        self._ask(f"{action} {key.decode()}", Kind.UNPARK, request.SerializeToString(), hear)
