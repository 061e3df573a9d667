"""Clients of a simulated cluster: they send, receive, ack, change and recall through proxies.

Each is behind one of the proxies; what it was told goes to the oracle, and a request whose proxy
died was told nothing.
"""

import random
from collections.abc import Callable
from functools import partial

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutRequest, RecallResult
from popmq.common.topics import MessageType
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.cluster_world.history import (
    ClusterReader,
    DeliveryHistory,
    Message,
    ReceiveRequestHistory,
)
from popmq.testing.cluster_world.oracle import ClusterOracle, delivery_name, refusal_reason
from popmq.testing.cluster_world.router import Router
from popmq.testing.cluster_world.sometimes_states import ClusterSometimes as States
from popmq.testing.harness.core_broker import pop as encode_pop
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.sim.equal_ids import EqualIds

GROUP = "group-a"
NORMAL, FIFO, DELAY, QUICK = "plain", "ordered", "delayed", "quick"
PUSHING = "a-client"  # whose deliveries are renewed
KEYS = (b"a", b"b", b"c")
FIFO_QUEUES = 2
INVISIBLE_MS = (300, 2_000, 6_000, 9_000)
PATIENCE_MS = (800, 3_000, 8_000)
DELAYS_MS = (1_200, 4_000, 9_000, 14_000)


class ClusterClients:
    def __init__(
        self,
        routers: list[Router | None],
        oracle: ClusterOracle,
        rng: random.Random,
        tally: StateCounts,
        note: Callable[[str], None],
    ) -> None:
        self.routers = routers
        self.held: list[DeliveryHistory] = []
        self.open: dict[int, Callable[[], None]] = {}  # what to do if its proxy dies
        self.answered = 0
        self.failed_ms = 0
        self.on_memory: Callable[[Message], None] = lambda message: None  # a send of QUICK was OK
        self._by_proxy: dict[int, int] = {}
        self._oracle = oracle
        self._rng = rng
        self._tally = tally
        self._note = note
        self._numbers = 0
        self.healed = False
        self.ids = EqualIds(0)
        self._made: set[str] = set()  # topics and groups
        self._unasked: list[Callable[[], None]] = []
        self._sending: set[bytes] = set()  # message groups with a send that is not answered

    # -- asking

    def ask(
        self,
        what: str,
        kind: Kind,
        body: bytes,
        hear: Callable[[bytes | PopmqError, int], None],
        *,
        lost: Callable[[], None],
        timeout_ms: int = 0,
        on_unknown: Callable[[], None] = lambda: None,
        proxy: int | None = None,
    ) -> None:
        """`hear` gets the answer and the number of tries whose end nobody knows.  Without a
        `proxy` any that is up is asked."""
        up = [number for number, router in enumerate(self.routers) if router is not None]
        up = up if proxy is None else [number for number in up if number == proxy]
        self._numbers += 1
        number = self._numbers
        if not up:
            return
        proxy = self._rng.choice(up)
        router = self.routers[proxy]
        assert router is not None
        self._oracle.at += 1
        self._note(f"{number} {what}")
        self.open[number] = lost
        self._by_proxy[number] = proxy

        def answered(answer: bytes | PopmqError, unknown: int) -> None:
            if self.open.pop(number, None) is None:
                return
            del self._by_proxy[number]
            self._oracle.at += 1
            self.answered += 1
            self._tally.hit(States.RETRIED, int(unknown > 0))
            if isinstance(answer, PopmqError):
                self._note(f"{number} -> {answer.code.name}")
                if answer.code is Code.INTERNAL_ERROR:
                    self._oracle.report_violation("I0 answers", f"{what}: {answer}")
            hear(answer, unknown)

        timeout_ms = timeout_ms or self._rng.choice(PATIENCE_MS)
        router.request(GROUP, kind, body, timeout_ms, answered, on_unknown)

    def proxy_died(self, proxy: int) -> None:
        for number in [client for client, at in self._by_proxy.items() if at == proxy]:
            del self._by_proxy[number]
            self._oracle.at += 1
            self.open.pop(number)()

    # -- sends

    def send(self, topic: str) -> None:
        rng, oracle = self._rng, self._oracle
        key = rng.choice(KEYS) if topic == FIFO else b""
        if key in self._sending and key:
            return  # a producer waits for its answer, or there is no order
        number = len(oracle.messages)
        size = rng.choice((20, 60, 300, 1_200))
        name = b"m%06d" % number
        if topic != DELAY:  # those are recalled by their ids
            name = self.ids.name(topic, name.decode()).encode()
        properties = bytes((3 << 3 | 2, len(name))) + name
        if key:
            properties += b"\x8a\x01" + bytes((len(key),)) + key
        properties += self.ids.fingerprint(number)
        message = Message(
            number, topic, b"%06d|" % number + rng.randbytes(size), properties, oracle.now_ms, key
        )
        message.in_memory = topic == QUICK
        kind, queue_id = MessageType.NORMAL, -1
        if topic == FIFO:
            kind, queue_id = MessageType.FIFO, key[0] % FIFO_QUEUES
            self._sending.add(key)
        if topic == DELAY:
            kind, message.delay_ms = MessageType.DELAY, rng.choice(DELAYS_MS)
        oracle.messages.append(message)
        entry = PutEntry(
            kind, message.head, properties, 0, queue_id, -message.delay_ms, name.decode()
        )
        body = hop.encode_put(PutRequest(topic, [entry]))
        connected = partial(self._sent, message)
        lost = partial(self._send_lost, message)
        self.ask(f"put {topic} {number}", Kind.PUT, body, connected, lost=lost)
        if not self.open:
            self._sending.discard(key)

    def _sent(self, message: Message, answer: bytes | PopmqError, unknown: int) -> None:
        self._sending.discard(message.key)
        if isinstance(answer, PopmqError):
            self._check_known("a send", answer, message.topic)
            message.refused = not unknown and answer.code is not Code.PROXY_TIMEOUT
            return
        (result,) = hop.decode_put_reply(answer)
        if result.code == Code.OK:
            self._oracle.sent(message, result.due_ms)
            message.epoch = self.epoch
            if message.in_memory:
                self.on_memory(message)
            self._note(f"sent {message.number}")
        else:
            message.refused = not unknown

    def _send_lost(self, message: Message) -> None:
        self._sending.discard(message.key)

    # -- receives

    def receive(
        self,
        reader: ClusterReader,
        *,
        limit: int,
        invisible_ms: int,
        poll_ms: int,
        proxy: int | None = None,
    ) -> None:
        oracle = self._oracle
        asked = ReceiveRequestHistory(
            reader,
            invisible_ms,
            poll_ms,
            oracle.at + 1,
            oracle.now_ms,
            oracle.log_ms,
            reader.lost_pops,
            alone=not reader.open_pops,
        )
        reader.open_pops += 1
        body = encode_pop(
            reader.topic,
            reader.group,
            limit=limit,
            invisible_ms=invisible_ms,
            poll_ms=poll_ms,
            client_id=PUSHING if reader.renewed else "pulling",
            auto_renew=reader.renewed,
        )
        what = f"pop {reader.topic} {reader.group} {limit} {invisible_ms} {poll_ms}"
        timeout_ms = poll_ms + self._rng.choice(PATIENCE_MS)
        before = len(self.open)
        self.ask(
            what,
            Kind.POP,
            body,
            partial(self._popped, asked),
            lost=lambda: oracle.pop_lost(asked),
            timeout_ms=timeout_ms,
            on_unknown=lambda: oracle.pops_unseen(reader, 1),
            proxy=proxy,
        )
        if len(self.open) == before:
            reader.open_pops -= 1

    def _popped(
        self, asked: ReceiveRequestHistory, answer: bytes | PopmqError, unknown: int
    ) -> None:
        oracle, reader = self._oracle, asked.reader
        if isinstance(answer, PopmqError):
            self._check_known("a receive", answer, reader.topic, reader.group)
            reader.open_pops -= 1
            return
        deliveries = hop.decode_pop_reply(answer).deliveries
        got = [
            held
            for delivery in deliveries
            if (held := self._delivered(asked, delivery)) is not None
        ]
        self._note(f"got {[(held.message.number, held.attempt) for held in got]}")
        self._tally.hit(States.REDELIVERED, sum(held.attempt > 1 for held in got))
        oracle.popped(asked, got)
        self.held += got

    def _delivered(
        self, asked: ReceiveRequestHistory, delivery: hop.Delivery
    ) -> DeliveryHistory | None:
        oracle, digits = self._oracle, delivery.head[:6]
        number = int(digits) if digits.isdigit() else -1
        if not 0 <= number < len(oracle.messages) or oracle.messages[number].head != delivery.head:
            oracle.report_violation(
                "bytes", f"{asked.reader.group} got {delivery.head[:30]!r}, never sent so"
            )
            return None
        message = oracle.messages[number]
        if message.properties != delivery.properties:
            oracle.report_violation("bytes", f"message {number} has other properties")
        times = asked.log_ms, asked.invisible_ms, oracle.at
        held = DeliveryHistory(asked.reader, message, delivery.attempt, delivery.handle, *times)
        held.epoch = self.epoch
        later = message.due_ms > 0 and message.epoch < self.epoch and held.attempt == 1
        self._tally.hit(States.TIMER_OVER_SWITCH, int(later))
        return held

    def report(self, *, gone: bool = False) -> None:
        """What a proxy tells each second of the client whose deliveries are renewed."""
        log_ms = self._oracle.log_ms
        readers = [reader for reader in self._oracle.readers if reader.renewed]

        def heard(answer: bytes | PopmqError, unknown: int) -> None:
            if not gone and not isinstance(answer, PopmqError) and not unknown:
                for reader in readers:
                    self._oracle.client_heard(reader, log_ms)

        if gone:
            for reader in readers:
                reader.left = True
        names = (PUSHING,)
        report = hop.ClientsReport(closed=names) if gone else hop.ClientsReport(alive=names)
        body = hop.encode_clients(report)
        self.ask("clients", Kind.CLIENTS, body, heard, lost=lambda: None, timeout_ms=1_000)

    # -- acks and changes

    def ack(self, held: DeliveryHistory, proxy: int | None = None) -> None:
        oracle, reader = self._oracle, held.reader
        refuse = refusal_reason(held)
        held.asking += 1
        held.history.ending += 1

        def over() -> None:
            held.asking -= 1
            held.history.ending -= 1

        def heard(answer: bytes | PopmqError, unknown: int) -> None:
            over()
            if isinstance(answer, PopmqError):
                self._tally.hit(States.ACK_UNKNOWN)
                oracle.ack_unknown(held)
                return
            (result,) = hop.decode_ack_reply(answer)
            ok = result.code == Code.OK
            self._note(f"ack {held.message.number}/{held.attempt} {'OK' if ok else 'refused'}")
            if ok or result.code == Code.INVALID_RECEIPT_HANDLE:
                self._tally.hit(States.HANDLE_FROM_BEFORE, int(ok and held.epoch < self.epoch))
                oracle.acked(held, ok, refuse)

        def lost() -> None:
            over()
            oracle.ack_unknown(held)

        body = hop.encode_ack(hop.AckRequest(reader.topic, reader.group, [held.handle]))
        what = f"ack {reader.group} {held.message.number}/{held.attempt}"
        before = len(self.open)
        self.ask(what, Kind.ACK, body, heard, lost=lost, proxy=proxy)
        if len(self.open) == before:
            over()

    epoch = 0  # of the newest master, as the run knows

    def change(self, held: DeliveryHistory, invisible_ms: int) -> None:
        oracle, reader = self._oracle, held.reader
        held.asking += 1
        held.changes.append((oracle.log_ms, invisible_ms))

        def heard(answer: bytes | PopmqError, unknown: int) -> None:
            held.asking -= 1
            if isinstance(answer, PopmqError):
                # A try that was done has made the old handle a superseded one.
                refused = answer.code is Code.INVALID_RECEIPT_HANDLE and not unknown
                if not refused:
                    held.superseded = held.superseded or 1
                elif oracle.must_accept(held) and not held.history.acked:
                    oracle.report_violation(
                        "I6 live-handle", f"{delivery_name(held)}: change refused in time"
                    )
                return
            after = held.successor
            if after is not None and after.handle == answer:
                return  # repeated, and nothing was changed
            if held.superseded == 2:
                delivery = delivery_name(held)
                oracle.report_violation("I6 stale-handle", f"{delivery}: changed to two handles")
            repeated = held.superseded == 1  # the first one may count, whose answer was lost
            held.superseded = 2
            # Of two that were asked at once, either was done, and the other got its answer.
            log_ms, least_ms = min(held.changes, key=sum)
            new = DeliveryHistory(
                reader, held.message, held.attempt, answer, log_ms, least_ms, oracle.at
            )
            new.epoch = self.epoch
            new.superseded = int(repeated)
            held.successor = new
            if held.history.given.get(held.attempt) is held:
                held.history.given[held.attempt] = new
            self.held.append(new)
            self._note(f"changed {held.message.number}/{held.attempt}")

        def lost() -> None:
            held.asking -= 1
            held.superseded = held.superseded or 1

        body = hop.encode_change(
            hop.ChangeRequest(reader.topic, reader.group, held.handle, invisible_ms)
        )
        what = f"change {reader.group} {held.message.number}/{held.attempt} {invisible_ms}"
        before = len(self.open)
        self.ask(what, Kind.CHANGE, body, heard, lost=lost)
        held.asking -= len(self.open) == before

    # -- timers

    def recall(self, message: Message) -> None:
        message.recall_asked = True
        request = pb.RecallRequest(topic=DELAY, message_id=f"m{message.number:06d}")
        request.due_ms = message.due_ms

        def heard(answer: bytes | PopmqError, unknown: int) -> None:
            if isinstance(answer, PopmqError):
                return
            reply = pb.RecallReply.FromString(answer)
            self._note(f"recall {message.number} {reply.outcome}")
            if reply.outcome == RecallResult.DONE:
                message.cancelled = True
                self._tally.hit(States.RECALLED)
                if any(reader.history(message.number).given for reader in self._oracle.readers):
                    self._oracle.report_violation(
                        "I11 cancel-truth", f"message {message.number}: DONE, and was delivered"
                    )

        self.ask(
            f"recall {message.number}",
            Kind.RECALL,
            request.SerializeToString(),
            heard,
            lost=lambda: None,
        )

    # -- administration

    def make(self) -> None:
        """The topics and groups of the run; asked again until all are there."""
        requested = (
            (NORMAL, "normal", 3),
            (FIFO, "fifo", 2),
            (DELAY, "delay", 2),
            (QUICK, "normal", 2),
        )
        for name, kind, queues in requested:
            durability = "memory" if name == QUICK else "disk"
            topic = pb.Topic(name=name, queues=queues, type=kind, durability=durability)
            body = pb.CreateTopicRequest(topic=topic).SerializeToString()
            self._make(f"create topic {name}", Kind.CREATE_TOPIC, body)
        for reader in self._oracle.readers:
            group = pb.Group(
                name=reader.group,
                type="fifo" if reader.fifo else "normal",
                max_attempts=reader.max_attempts,
                back_off_ms=[500],
                start_at="oldest",
                check_points="buffered" if reader.buffered else "durable",
            )
            body = pb.CreateGroupRequest(group=group).SerializeToString()
            self._make(f"create group {reader.group}", Kind.CREATE_GROUP, body)

    def _make(self, what: str, kind: Kind, body: bytes) -> None:
        def again() -> None:
            self._make(what, kind, body)

        def heard(answer: bytes | PopmqError, unknown: int) -> None:
            if isinstance(answer, PopmqError) and answer.code is not Code.BAD_REQUEST:
                again()
            else:
                self._made.add(what.rpartition(" ")[2])

        before = len(self.open)
        self.ask(what, kind, body, heard, lost=again, timeout_ms=8_000)
        if len(self.open) == before:
            self._unasked.append(again)

    def proxy_is_back(self) -> None:
        """What could not be asked for while there was none."""
        waiting, self._unasked = self._unasked, []
        for again in waiting:
            again()

    def _check_known(self, what: str, answer: PopmqError, *names: str) -> None:
        """What was made once is there; a master that is deposed and does not know it yet may say
        otherwise, so that is asked for when all has healed."""
        missing = answer.code in (Code.TOPIC_NOT_FOUND, Code.CONSUMER_GROUP_NOT_FOUND)
        if self.healed and missing and self._made.issuperset(names):
            self._oracle.report_violation("I1 no-loss", f"{what}: {answer}")
