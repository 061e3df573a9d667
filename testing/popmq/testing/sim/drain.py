"""The end of a run: nothing fails any more, every lasting group reads and acks what is left."""

from collections import Counter
from collections.abc import Callable

from popmq.common import topics
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.harness.sometimes import Sometimes
from popmq.testing.oracle.client_history import (
    GroupReader,
    Held,
    MessageHistory,
    ResourceIncarnation,
    SentMessageHistory,
)
from popmq.testing.oracle.delivery_oracle import LIMBO_MS, Oracle
from popmq.testing.oracle.push_client_liveness import LOOK_MS, SILENCE_MS
from popmq.testing.sim.clients import LONG_MS, MAX_INVISIBLE_MS, SimClients
from popmq.testing.sim.operators import PUSH_CLIENTS, Operators
from popmq.testing.sim.producers import KEYS, QUIET
from popmq.testing.sim.retention import RetentionChecks
from popmq.testing.sim.simulated_broker import SimulatedBroker
from popmq.testing.sim.store_checks import StoreChecks
from popmq.testing.sim.topic_retention import TopicRetention

_ROUND_MS = 500


def drain(
    machine: SimulatedBroker,
    clients: Operators,
    oracle: Oracle,
    checks: StoreChecks,
    retention: RetentionChecks,
    topic_retention: TopicRetention,
    note: Callable[[str], None],
    *,
    silence: bool,
) -> None:
    """Receive and ack until everything that was invisible had its time and two seconds more.

    Push consumers are gone: they say good-bye, or there is `silence`.
    """
    audit = clients.groups["audit"]
    assert audit is not None
    lasting = [reader for reader in oracle.readers if reader.alive]
    auditors = [GroupReader(audit, place) for place in clients.topics.values() if place is not None]
    oracle.readers += auditors
    longest_ms = MAX_INVISIBLE_MS + LIMBO_MS + (SILENCE_MS + LOOK_MS) * silence
    for client_id in PUSH_CLIENTS if not silence else ():
        clients.report(client_id, gone=True)
    # A parked key waits for the one of its messages that is in flight, and is then resumed.
    rounds = (longest_ms * (1 + oracle.parks)) // _ROUND_MS + 2
    for number in range(rounds):
        before = clients.quiet
        _resume(machine, clients, lasting)
        for reader in lasting if number else lasting + auditors:
            empty(machine, clients, reader)
        if not number and not oracle.log_lost:
            _check_stored(oracle, checks, auditors)
        if oracle.violations:
            return
        all_quiet = clients.quiet - before == len(lasting)
        if number and all_quiet and machine.nothing_in_flight and machine.nothing_parked:
            break
        machine.advance(_ROUND_MS)
        machine.run_steps()
    for reader in lasting:
        empty(machine, clients, reader)
    if retention.on:
        _grow_old(machine, clients, oracle, lasting + auditors, retention, topic_retention)
    if not oracle.log_lost:
        _send_back(machine, clients, oracle, lasting)
    if not oracle.log_lost:
        names = {name for name, place in (clients.topics | clients.groups).items() if place}
        checks.at_end(names)
        retention.at_end()
    _read_dead_letters(machine, clients, oracle, audit)
    if oracle.log_lost:
        return
    finish(oracle, [r for r in lasting if not r.group.from_newest] + auditors, retention.excused)
    passed = [s for r in lasting for s in oracle.messages if s.ok_at and not r.accepts(s)]
    clients.count(Sometimes.FILTERED, len(passed))
    note(f"drained {len(oracle.messages)} messages")


def _resume(machine: SimulatedBroker, clients: Operators, readers: list[GroupReader]) -> None:
    if machine.nothing_parked:
        return
    for reader in readers:
        for key in sorted(set(KEYS)) if reader.group.fifo else ():
            clients.unpark(reader, key, "resume")
    machine.run_until_idle()


def _send_back(
    machine: SimulatedBroker, clients: Operators, oracle: Oracle, lasting: list[GroupReader]
) -> None:
    """All dead letters of normal groups come once more, and are acked."""
    for name in sorted({reader.group.name for reader in lasting if not reader.group.fifo}):
        readers = {reader.topic.name: reader for reader in lasting if reader.group.name == name}
        requested = _letters(machine, clients, name, readers)
        at = oracle.at
        clients.redrive(name)
        machine.run_until_idle()
        for reader in readers.values():
            empty(machine, clients, reader)
        for number, life in requested:
            if not life.loose and life.acked_at < at:
                oracle.report_violation(
                    "redrive", f"letter of {number}, {name} did not come back", life
                )


def _letters(
    machine: SimulatedBroker, clients: Operators, group: str, readers: dict[str, GroupReader]
) -> list[tuple[int, MessageHistory]]:
    """The number and the life of each dead letter that was not sent back yet."""
    numbers: list[tuple[int, MessageHistory]] = []

    def told(letters: list[pb.DeadLetter]) -> None:
        for letter in letters:
            reader = readers.get(letter.origin_topic)
            if reader is not None and not letter.redriven:
                number = int(letter.head[:6])
                numbers.append((number, reader.lives.setdefault(number, MessageHistory())))

    clients.letters(group, told)
    machine.run_until_idle()
    return numbers


def _check_stored(oracle: Oracle, checks: StoreChecks, auditors: list[GroupReader]) -> None:
    for reader in auditors:
        stored = checks.stored(reader.topic.name)
        copies = any(sent.copied and sent.topic is reader.topic for sent in oracle.messages)
        if stored != len(reader.lives) and not (copies and stored > len(reader.lives)):
            oracle.report_violation(
                "I16 counts-true",
                f"{reader.topic.name} stores {stored} messages, {len(reader.lives)} were read",
            )


def _grow_old(
    machine: SimulatedBroker,
    clients: SimClients,
    oracle: Oracle,
    readers: list[GroupReader],
    retention: RetentionChecks,
    topic_retention: TopicRetention,
) -> None:
    """What was held for hours comes back; then hours of a little traffic bound the log."""
    for held_ms in LONG_MS:
        due_ms = oracle.healed_ms + held_ms
        while (left_ms := due_ms - machine.clock.boot_ms()) > 0:
            machine.advance(min(left_ms, 1_200_000))
            machine.run_steps()
            topic_retention.check_fronts()
        for _ in range(4):  # one of a parked key that came back is parked first, by a step
            machine.advance(_ROUND_MS)
            machine.run_steps()
            for reader in readers:
                empty(machine, clients, reader)
    ends = []
    for last in (*[False] * 6, True):
        for _ in range(5):
            clients.send()
        if last:
            clients.send(clients.topics[QUIET])
        machine.run_until_idle()
        for reader in readers:
            empty(machine, clients, reader)
        ends.append(machine.broker.store.end)
        for _ in range(9):  # small enough that a topic's expiry sees messages of nearly its age
            machine.advance(200_000)
            machine.run_steps()
        topic_retention.check_fronts()
    retention.check_bound(ends[-1] - ends[-5])


def empty(machine: SimulatedBroker, clients: SimClients, reader: GroupReader) -> None:
    """Read all that is ready, ack it at once."""
    more = True

    def then(held: list[Held]) -> None:
        nonlocal more
        more = bool(held)
        clients.held.clear()
        if held:
            clients.ack(held)

    while more:
        more = False
        clients.receive(reader, then=then)
        machine.run_until_idle()


def _read_dead_letters(
    machine: SimulatedBroker, clients: SimClients, oracle: Oracle, audit: ResourceIncarnation
) -> None:
    names = {reader.group.name for reader in oracle.readers}
    for name in sorted(names):
        letters = GroupReader(audit, ResourceIncarnation(topics.dlq_topic(name), gone=1))
        copies: Counter[int] = Counter()
        for head in clients.read_all(letters, machine.run_until_idle):
            number = int(head[:6]) if head[:6].isdigit() else -1
            known = 0 <= number < len(oracle.messages) and oracle.messages[number].head == head
            if not known:
                oracle.report_violation(
                    "bytes", f"a dead letter of {name} was never sent: {head[:40]!r}"
                )
            copies[number] += 1
        clients.count(Sometimes.DEAD_LETTER, sum(copies.values()))
        if not oracle.log_lost:
            for number, times in copies.items():
                dead_letter(oracle, name, number, times)


Excuse = Callable[[GroupReader, SentMessageHistory, MessageHistory | None], bool]


def dead_letter(oracle: Oracle, group: str, number: int, copies: int) -> None:
    """`copies` of a message were found among the dead letters of the group's name."""
    topic = oracle.messages[number].topic
    readers = [r for r in oracle.readers if r.group.name == group and r.topic is topic]
    if not readers:
        return  # the group was made without an answer
    lives = [reader.lives.setdefault(number, MessageHistory()) for reader in readers]
    chains = sum(1 + life.chain + life.again + life.loose * copies for life in lives)
    if copies > max(1, chains):
        oracle.report_violation(
            "I8 max-N", f"{copies} dead letters of message {number}, {group}", lives[-1]
        )
    for life in lives:
        life.dead += copies
    if len(readers) > 1:
        return  # the group was made again: which of them it died in, nobody can say
    life, reader = lives[0], readers[0]
    if life.loose or life.chain or life.again:
        return  # of which of its lives it is a letter, neither
    if life.rejected or life.resolved_at:
        return
    if life.attempt < reader.group.max_attempts and not reader.unseen(life):
        oracle.report_violation("I8 max-N", f"message {number} died at {life.attempt}", life)
    if life.acked == 2:
        oracle.report_violation("I5 ack-final", f"message {number}: acked and dead", life)


def finish(oracle: Oracle, readers: list[GroupReader], excused: Excuse) -> None:
    """After the drain: everything confirmed is acked or dead in every lasting group."""
    for reader in readers:
        for sent in oracle.messages:
            if not sent.ok_at or sent.topic is not reader.topic or not reader.accepts(sent):
                continue
            life = reader.lives.get(sent.number)
            missing = life is None or not (
                life.acked or life.dead or life.passed or life.resolved_at
            )
            if life is not None and life.rejected == 2 and not life.dead and not life.loose:
                missing = True
            if missing and not excused(reader, sent, life):
                known = life is not None and life.attempt > 0
                oracle.report_violation(
                    "I2 no-limbo" if known else "I1 no-loss",
                    f"message {sent.number} of {sent.topic.name}, confirmed at {sent.ok_at}, "
                    f"never came {'back ' if known else ''}to group {reader.group.name}",
                    life,
                )
