"""Random histories of one broker, and an independent account of what reports must say of them.

`Life` drives the real broker with what clients and operators do, restarts it and fails over, and
enters what each reply said into plain sets and counters.  Which parked messages are where it looks
up at the broker, because that choice is the broker's; what follows from it is calculated here.
"""

import random
from dataclasses import replace

from replica.pair import Slave
from report.history_account import Account, Held, Pair, Topic, Waiting
from report.reports_rig import ColdTimes

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.record.receipt import ReceiptReader
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.common.settings.settings import PopSettings
from popmq.common.topics import GroupType, MessageType
from popmq.common.wire import admin_pb2 as admin
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.clock import ManualClock
from popmq.testing.harness.core_broker import SMALL, CoreBroker, pop

SETTINGS = replace(
    SMALL,
    pop=PopSettings(fifo_open_offsets=8, fifo_park_after_ms=5_000),
    replication=ReplicationSettings(replicas=2),
)
CLIENTS = ("ann", "bob", "eve")


class Life(Account):
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.core: CoreBroker = CoreBroker(
            disk=LyingDisk(), clock=self.clock, seed=seed, settings=SETTINGS
        )
        super().__init__(
            {
                f"a{seed}": GroupType.NORMAL,
                f"b{seed}": GroupType.NORMAL,
                f"f{seed}": GroupType.FIFO,
            }
        )
        for name, kind in self.groups.items():
            self._make_group(name, kind)
        self._make_topic(f"orders{seed}", fifo=False)
        self._make_topic(f"lines{seed}", fifo=True)
        self.ages_known = True
        self.names: dict[int, str] = {}  # of clients, as the report reads them

    # -- the history

    def run(self, actions: int) -> None:
        acts = [
            *[self._send] * 6,
            *[self._receive] * 7,
            *[self._ack] * 5,
            *[self._change] * 2,
            *[self._reject] * 2,
            *[self._pass] * 5,
            *(self._reset, self._redrive, self._unpark, self._undo, self._cut),
            *(self._delete_topic, self._delete_group, self._fail_over),
        ]
        rare = {self._delete_topic, self._delete_group, self._fail_over}
        for _ in range(actions):
            act = self.rng.choice(acts)
            if act in rare and self.rng.random() < 0.7:
                continue
            act()
        self._stick()
        for _ in range(actions // 4):
            self.rng.choice([self._unpark, self._receive, self._ack, self._reset, self._pass])()
        self._end()
        self._note_all_parked()

    def _end(self) -> None:
        """Half of the histories end while consumers hold messages, and half an hour after the
        consumers stopped. In some of these, records are on the disk alone, or cannot be read."""
        self.stopped = self.rng.random() < 0.5
        how = self.rng.choice(("warm", "cold", "dark", "dark until the report"))
        self.how = how if self.stopped else "busy"
        if not self.stopped:
            self._pass()
            return
        for _ in range(35):
            self.advance(20_000)  # everything that is held comes back
        if how.startswith("dark"):  # a broker that remembers no times, as earlier ones did
            self.core.broker.diagnostics.head_times.kept_limit = 1
        known = self.rng.random() < 0.5
        if known:
            self.advance(60_000)
        cold = ColdTimes(self.core, dark=how.startswith("dark")) if how != "warm" else None
        for _ in range(12):
            self.core.advance(300_000)
        if cold is not None and how == "dark until the report":
            cold.dark = False
        self.ages_known = how != "dark" or known

    def _make_topic(self, name: str, *, fifo: bool) -> None:
        kind = MessageType.FIFO if fifo else MessageType.NORMAL
        self.core.topic(name, queues=1 if fifo else 2, type=kind)
        self.topics[name] = Topic(name, fifo, {0: []} if fifo else {0: [], 1: []})

    def _make_group(self, name: str, kind: GroupType) -> None:
        self.core.group(name, type=kind, max_attempts=3)

    def _some(self) -> tuple[str, Topic]:
        topic = self.rng.choice(list(self.topics.values()))
        kind = GroupType.FIFO if topic.fifo else GroupType.NORMAL
        return self.rng.choice(
            [name for name, group_type in self.groups.items() if group_type is kind]
        ), topic

    # -- clients

    def _send(self, *, key: str = "", count: int = 0) -> None:
        _, topic = self._some()
        for _ in range(count or self.rng.randrange(1, 5)):
            self.clock.advance(self.rng.randrange(50))
            key_ = key or self.rng.choice("xyz")
            name = key_ if topic.fifo else ""
            self._store(topic, name)

    def _store(self, topic: Topic, key: str) -> None:
        body = b"%d" % len(topic.places)
        result = self.core.send(topic.name, body, message_group=key)
        topic.places[body] = (result.queue_id, result.queue_offset)
        times = topic.queues[result.queue_id]
        assert result.queue_offset == len(times)
        times.append(self.clock.wall_ms())

    def _receive(self) -> None:
        group, topic = self._some()
        pair = topic.pairs.setdefault(group, Pair())
        client, limit = self.rng.choice(CLIENTS), self.rng.randrange(1, 6)
        self._take(group, topic, pair, client, limit, self.rng.choice((2_000, 20_000, 600_000)))

    def _held(self, topic: Topic, pair: Pair, delivery: Delivery) -> Held:
        """Where the message comes from, by the receipt handle."""
        registry = self.core.broker.registry
        receipt = ReceiptReader().decode(delivery.handle, registry.signing_keys)
        side = receipt.topic_id != registry.topic(topic.name).id
        queue, offset = receipt.queue_id, receipt.queue_offset
        if not side and not topic.fifo:
            assert offset == pair.cursors.get(queue, 0), "a queue is read in order"
            pair.cursors[queue] = offset + 1
        elif side and topic.fifo:
            offset = pair.parked[offset]
        elif side:
            assert offset == pair.taken, "retries are read in order"
            queue, offset = topic.places[delivery.head]
            pair.taken += 1
        return Held(delivery.handle, offset, queue, side, delivery.attempt, "", 0, 0)

    def _undo(self) -> None:
        """A receive whose reply nobody takes. Of a queue with its head known, and no retries."""
        group, topic = self._some()
        pair = topic.pairs.get(group)
        if pair is None or pair.taken < len(pair.retries) or topic.fifo:
            return
        queue = self.rng.randrange(2)
        at = pair.cursors.get(queue, 0)
        if at == len(topic.queues[queue]):
            return
        request = pop(topic.name, group, limit=1, queue_id=queue, client_id="nobody")
        answer = self.core.ask(Kind.POP, request, settle=False)
        self.core.server.cancel(answer.id)
        pair.cursors[queue] = at + 1
        from_ms = self.clock.wall_ms()
        self.advance(100)
        self._note_clients()
        pair.counts["undone"] += 1
        pair.counts["delivered"] += 1
        pair.clients["nobody"].update(("delivered", "undone"))
        pair.retries.append(Waiting(from_ms, self.clock.wall_ms()))

    def _ack(self) -> None:
        for group, topic, pair in self.readers():
            some = [entry for entry in pair.held if self.rng.random() < 0.4]
            if not some:
                continue
            results = self.core.ack(topic.name, group, *(delivery.handle for delivery in some))
            assert {result.code for result in results} == {Code.OK}, results
            for item in some:
                pair.end(item, "acked")
                pair.last_ack_ms[item.client] = self.log_ms()
                self.over(pair, topic, item)

    def _change(self) -> None:
        for group, topic, pair in self.readers():
            if pair.held and self.rng.random() < 0.5:
                choice = self.rng.choice(pair.held)
                invisible_ms = self.rng.choice((1_000, 30_000))
                choice.handle = self.core.change(topic.name, group, choice.handle, invisible_ms)
                choice.due_ms = self.log_ms() + invisible_ms
                pair.counts["changed"] += 1

    def _reject(self) -> None:
        for group, topic, pair in self.readers():
            if pair.held and self.rng.random() < 0.4:
                choice = self.rng.choice(pair.held)
                assert self.core.reject(topic.name, group, choice.handle).code == Code.OK
                self.dead_letter(group, topic, pair, choice)

    # -- time

    def log_ms(self) -> int:
        return self.core.broker.store.log_ms()

    def _pass(self) -> None:
        self.advance(self.rng.choice((500, 3_000, 25_000)))

    def advance(self, ms: int) -> None:
        """Time passes; what is due comes back. At the end nothing is just about to."""
        from_ms = self.clock.wall_ms()
        self.core.advance(ms)
        while any(
            self.log_ms() - 40 <= entry.due_ms <= self.log_ms() + 1
            for _, _, pair in self.readers()
            for entry in pair.held
        ):
            self.core.advance(60)
        for group, topic, pair in self.readers():
            self._note_parked(group, topic, pair)
            due = [entry for entry in pair.held if entry.due_ms < self.log_ms()]
            for item in sorted(due, key=lambda entry: entry.due_ms):
                self._came_back(group, topic, pair, item, from_ms, ms // 10)

    def _came_back(
        self, group: str, topic: Topic, pair: Pair, delivery: Held, from_ms: int, part_ms: int
    ) -> None:
        place = (delivery.queue, delivery.offset)
        if delivery.attempt >= 3:
            self.dead_letter(group, topic, pair, delivery)
        elif topic.fifo:
            pair.end(delivery, "returned")
            if delivery.side and delivery.offset in pair.doomed:
                self.dead_letter_parked(group, topic, pair, delivery.offset)
        else:
            pair.end(delivery, "retried")
            due_ms = self.clock.wall_ms() - (self.log_ms() - delivery.due_ms)
            to_ms = min(self.clock.wall_ms(), max(due_ms, from_ms) + part_ms + 100)
            pair.retries.append(Waiting(due_ms, to_ms))
            message = (id(topic), *place)
            known = self.retried[group].get(message, 0)
            self.retried[group][message] = max(delivery.attempt + 1, known)

    # -- operators

    def _reset(self) -> None:
        group, topic = self._some()
        pair = topic.pairs.setdefault(group, Pair())
        pair.met = True
        self._note_parked(group, topic, pair)
        request = admin.ResetOffsetRequest(group=group, topic=topic.name)
        queues = list(topic.queues)
        to = self.rng.choice(("oldest", "newest", "offset"))
        if to == "offset":
            queues = [self.rng.choice(queues)]  # pending retries stay
            request.queue_id = queues[0]
            request.offset = self.rng.randrange(len(topic.queues[queues[0]]) + 1)
        else:
            setattr(request, to, True)
        self.core.reply(Kind.RESET_OFFSET, request.SerializeToString())
        pair.was_reset = True
        for queue in queues:
            end = len(topic.queues[queue])
            at = {"oldest": 0, "newest": end, "offset": request.offset}[to]
            pair.cursors[queue] = at
            for item in list(pair.held):
                if item.queue == queue and not item.side:
                    pair.end(item, "reset")
            if topic.fifo:
                self.reset_in_order(pair, at)
        if to == "newest":
            for item in list(pair.held):  # pending retries are skipped, too
                if item.side:
                    pair.end(item, "reset")
            pair.taken = len(pair.retries)
            pair.parked.clear()
            pair.doomed.clear()
        self.counts[to] += 1

    def _redrive(self) -> None:
        group, _ = self._some()
        letters = self.letters[group]
        expected = [
            dead_letter
            for dead_letter in letters
            if not dead_letter.redriven and dead_letter.topic.alive
        ]
        request = admin.RedriveRequest(group=group).SerializeToString()
        from_ms = self.clock.wall_ms()
        try:
            reply = admin.RedriveReply.FromString(self.core.reply(Kind.REDRIVE, request))
        except PopmqError:
            assert not letters, "there are dead letters"
            return
        assert sum(redrive.redriven for redrive in reply.progress) == len(expected)
        self.counts["redriven"] += len(expected)
        for letter in expected:
            letter.redriven = True
            if letter.topic.fifo:
                letter.topic.queues[letter.place[0]].append(from_ms)
            else:
                pair = letter.topic.pairs.setdefault(group, Pair())
                pair.retries.append(Waiting(from_ms, self.clock.wall_ms()))

    def _note_parked(self, group: str, topic: Topic, pair: Pair) -> None:
        """Which messages the broker moved out of the way, and where they are now."""
        if not topic.fifo:
            return
        registry = self.core.broker.registry
        topic_id, group_id = registry.topic(topic.name).id, registry.group(group).id
        keys = self.core.broker.table.parked.of_group(group_id)
        for key in (key for key in keys if key.topic_id == topic_id):
            for origin, at in key.messages:
                if at not in pair.parked:
                    self.counts["parked"] += 1
                pair.parked[at] = origin
                pair.over.add(origin)

    def _stick(self) -> None:
        """One message of a key is held until so many wait behind it that the key is parked."""
        topic = self.topics[f"lines{self.seed}"]
        group = f"f{self.seed}"
        pair = topic.pairs.setdefault(group, Pair())
        for _ in range(12):
            self._store(topic, "k")
        for _ in range(4):
            self._take(group, topic, pair, "ann", 4, 600_000)
            self.advance(6_000)

    def _take(
        self, group: str, topic: Topic, pair: Pair, client: str, limit: int, invisible_ms: int
    ) -> None:
        pair.met = True
        self._note_parked(group, topic, pair)
        now_ms = self.log_ms()
        deliveries = self.core.receive(
            topic.name, group, limit=limit, invisible_ms=invisible_ms, client_id=client
        )
        self._note_clients()
        for delivery in deliveries:
            held = self._held(topic, pair, delivery)
            held.client, held.popped_ms, held.due_ms = client, now_ms, now_ms + invisible_ms
            pair.held.append(held)
            pair.counts["delivered"] += 1
            pair.clients[client]["delivered"] += 1

    def _unpark(self) -> None:
        for group, topic, pair in self.readers():
            if not topic.fifo:
                continue
            self._note_parked(group, topic, pair)
            registry = self.core.broker.registry
            parked = self.core.broker.table.parked.of_group(registry.group(group).id)
            keys = [key for key in parked if key.topic_id == registry.topic(topic.name).id]
            if not keys:
                continue
            key = self.rng.choice(keys)
            mine = [origin for origin, _ in key.messages]
            held = {item.offset for item in pair.held if item.side}
            action = self.rng.choice(("resume", "resume", "skip", "dead-letter"))
            request = admin.UnparkRequest(
                group=group, topic=topic.name, key=key.name.decode(), action=action
            )
            self.core.reply(Kind.UNPARK, request.SerializeToString())
            self.counts[action] += 1
            for offset in mine:
                if action == "skip" and offset not in held:
                    self.parked_over(pair, offset)
                elif action == "dead-letter":
                    pair.doomed.add(offset)
                    if offset not in held:
                        self.dead_letter_parked(group, topic, pair, offset)
                elif action == "resume":
                    pair.doomed.discard(offset)
            self.advance(50)

    def _delete_topic(self) -> None:
        _, topic = self._some()
        request = admin.DeleteTopicRequest(name=topic.name)
        self.core.reply(Kind.DELETE_TOPIC, request.SerializeToString())
        topic.alive = False
        self.deleted.append(topic)  # so that its identity is not given again
        for retried in self.retried.values():  # dead letters stay, retries do not
            for message in [entry for entry in retried if entry[0] == id(topic)]:
                del retried[message]
        self._make_topic(topic.name, fifo=topic.fifo)
        self.counts["topic deleted"] += 1

    def _delete_group(self) -> None:
        group = self.rng.choice(list(self.groups))
        request = admin.DeleteGroupRequest(name=group)
        self.core.reply(Kind.DELETE_GROUP, request.SerializeToString())
        for topic in self.topics.values():
            topic.pairs.pop(group, None)
        self.retried.pop(group, None)
        self._make_group(group, self.groups[group])
        self.counts["group deleted"] += 1

    # -- machines

    def _cut(self) -> None:
        """The process ends, cleanly or by a power cut; everything was confirmed."""
        self.advance(100)
        if self.rng.random() < 0.5:
            self.core.stop()
        else:
            assert isinstance(self.core.disk, LyingDisk)
            self.core.disk.restore_power()
        self.core.start()
        if isinstance(self.core, Slave):
            self.core.promote()
        self._forget_looks()
        self.counts["restart"] += 1

    def _fail_over(self) -> None:
        self.advance(100)
        slave = Slave(disk=LyingDisk(), clock=self.clock, seed=self.seed, settings=SETTINGS)
        slave.take(self.core, most=self.core.broker.store.confirmed)
        slave.promote()
        self.core = slave
        self._forget_looks()
        self.counts["failover"] += 1

    def _forget_looks(self) -> None:
        """A receive that found nothing is no record: a snapshot may remember it, or nothing."""
        registry, table = self.core.broker.registry, self.core.broker.table
        for group, topic, pair in self.readers():
            if not pair.counts["delivered"] and not pair.was_reset:
                topic_id, group_id = registry.topic(topic.name).id, registry.group(group).id
                queues = [table.progress(group_id, topic_id, queue) for queue in topic.queues]
                pair.met = any(queue is not None for queue in queues)

    def _note_clients(self) -> None:
        for number, name in self.core.broker.deliveries.clients.items():
            self.client_numbers[name] = number

    def _note_all_parked(self) -> None:
        for group, topic, pair in self.readers():
            self._note_parked(group, topic, pair)
