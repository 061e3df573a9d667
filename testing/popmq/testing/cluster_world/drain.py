"""The end of a run: the group serves, every message comes to its end, and all replicas agree."""

from collections import Counter
from collections.abc import Callable

from popmq.broker.node.broker_node import BrokerNode
from popmq.common import topics
from popmq.common.errors import PopmqError
from popmq.common.protocol.messaging_payloads import AckRequest, Kind, decode_pop_reply, encode_ack
from popmq.testing.cluster_world.broker import ClusterBroker
from popmq.testing.cluster_world.clients import DELAYS_MS, GROUP, INVISIBLE_MS
from popmq.testing.cluster_world.golden_log import log_bytes
from popmq.testing.cluster_world.sometimes_states import ClusterSometimes as States
from popmq.testing.cluster_world.world import ClusterWorld
from popmq.testing.harness.clock import ManualClock
from popmq.testing.harness.core_broker import pop as encode_pop
from popmq.testing.oracle.client_history import MessageHistory
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.sim.replay import ReplayCheck

SERVE_MS = 15_000  # within which everything has to work again
_ROUND_MS = 500
_REPLY_MS = 3_000  # within which a request of the drain is answered
_MORE_ROUNDS = 60  # after the last due time, while messages still come


def drain(world: ClusterWorld) -> None:
    oracle = world.oracle
    _wait_for_service(world)
    if oracle.violations:
        return
    world.clients.healed = True
    # A due time is wall time of the master that took the message; in log time only a cold start
    # may lose what a clock that was set back hides.
    apart_ms = 30_000 if world.far else world.oracle.ahead_ms - world.oracle.behind_ms
    longest_ms = max(INVISIBLE_MS) + 2_000 + apart_ms
    due_ms = max(DELAYS_MS) + 2_000 + apart_ms
    until_ms = world.time.now_ms + max(longest_ms, due_ms)
    more_rounds = _MORE_ROUNDS
    while not oracle.violations:
        count = _round(world)
        if _all_over(world) and _in_flight(world) == 0:
            break
        if world.time.now_ms >= until_ms:
            more_rounds -= 1
            if count == 0 or more_rounds == 0:
                break
        world.clients.report(gone=True)
    for _ in range(4):
        _round(world)
    if oracle.violations:
        return
    _read_dead_letters(world)
    oracle.finish()
    if not oracle.violations:
        _agree(world)


def _wait_for_service(world: ClusterWorld) -> None:
    """A master, all in its set, and an answer to a request, within the bound."""
    began_ms = world.time.now_ms
    while world.time.now_ms < began_ms + SERVE_MS and not world.oracle.violations:
        world.go(200)
        if _whole(world):
            break
    else:
        if not world.oracle.violations:
            record = world.records.newest(GROUP)
            states = [
                f"{broker.name}: {broker.node.role.name if broker.node else 'down'}"
                for broker in world.brokers
            ]
            world.oracle.report_violation("progress", f"after {SERVE_MS} ms: {record}, {states}")
        return
    world.trace_line("all replicas are in the set")
    world.go(12_000)  # what was asked for before comes to its end
    if world.clients.open and not world.oracle.violations:
        world.oracle.report_violation(
            "I15 answers", f"{len(world.clients.open)} requests have no answer"
        )


def _whole(world: ClusterWorld) -> bool:
    record = world.records.newest(GROUP)
    ids = {broker.node.identity.store_id for broker in world.brokers if broker.node is not None}
    return record is not None and set(record.sync_state_set) == ids and len(world.masters) == 1


def _round(world: ClusterWorld) -> int:
    """Each reader receives twice and acks what came; returns the number of deliveries."""
    count = 0
    world.clients.held.clear()
    for reader in world.oracle.readers:
        for _ in range(2):
            world.clients.receive(reader, limit=16, invisible_ms=6_000, poll_ms=0)
            _wait_for_replies(world)
            held, world.clients.held = world.clients.held, []
            count += len(held)
            for history in held:
                world.clients.ack(history)
    world.go(_ROUND_MS)
    _wait_for_replies(world)
    return count


def _wait_for_replies(world: ClusterWorld) -> None:
    """Slow links take hundreds of milliseconds."""
    end_ms = world.time.now_ms + _REPLY_MS
    world.go(60)
    while world.clients.open and world.time.now_ms < end_ms and not world.oracle.violations:
        world.go(60)


def _all_over(world: ClusterWorld) -> bool:
    for reader in world.oracle.readers:
        for message in world.oracle.messages:
            if message.topic != reader.topic or not message.ok_at or message.recall_asked:
                continue
            if message.excused:  # it may be gone
                continue
            story = reader.stories.get(message.number)
            if story is None or story.acked < 2:
                return False
    return True


def _in_flight(world: ClusterWorld) -> int:
    node = world.masters[0].node if world.masters else None
    return len(node.broker.table) if node is not None else 0


def _read_dead_letters(world: ClusterWorld) -> None:
    copies: Counter[tuple[str, int]] = Counter()
    for reader in world.oracle.readers:
        for head in _read_all(world, topics.dlq_topic(reader.group), reader.group):
            digits = head[:6]
            number = int(digits) if digits.isdigit() else -1
            if 0 <= number < len(world.oracle.messages):
                copies[reader.group, number] += 1
            else:
                world.oracle.report_violation(
                    "bytes", f"a dead letter was never sent: {head[:30]!r}"
                )
    for (group, number), count in sorted(copies.items()):
        (reader,) = [reader for reader in world.oracle.readers if reader.group == group]
        world.oracle.dead_letter(reader, world.oracle.messages[number], count)


def _read_all(world: ClusterWorld, topic: str, group: str) -> list[bytes]:
    heads: list[bytes] = []
    more = True
    while more and not world.oracle.violations:
        more = False

        def heard(answer: bytes | PopmqError, unknown: int) -> None:
            nonlocal more
            if isinstance(answer, PopmqError):
                return
            deliveries = decode_pop_reply(answer).deliveries
            heads.extend(delivery.head for delivery in deliveries)
            more = bool(deliveries)
            if deliveries:  # in order, what follows waits until these are over
                body = encode_ack(
                    AckRequest(topic, group, [delivery.handle for delivery in deliveries])
                )
                what = f"ack {topic}"
                world.clients.ask(what, Kind.ACK, body, lambda *_: None, lost=lambda: None)

        body = encode_pop(topic, group, limit=32, invisible_ms=600_000)
        world.clients.ask(f"pop {topic}", Kind.POP, body, heard, lost=lambda: None)
        world.go(300)
    return heads


def _agree(world: ClusterWorld) -> None:
    """Logs are the same bytes up to confirmed, and so are tables at one position."""
    oracle = world.oracle
    world.go(4_000)
    if oracle.violations:
        return
    if len(world.masters) != 1:
        oracle.report_violation("progress", f"{len(world.masters)} masters at rest")
        return
    (master,) = world.masters
    assert master.node is not None
    end = master.node.broker.store.confirmed
    if end < len(world.golden.data):
        oracle.report_violation(
            "I1 no-loss", f"{end} bytes, {len(world.golden.data)} were confirmed"
        )
    for broker in world.brokers:
        _compare(world, master.node, broker, end)


class Judge(Oracle):
    """What `ReplayCheck` needs to know of the clients: nothing. `report` gets each difference."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report

    def report_violation(
        self, invariant: str, what: str, life: MessageHistory | None = None
    ) -> None:
        self._report(what)


def _compare(world: ClusterWorld, master: BrokerNode, broker: ClusterBroker, end: int) -> None:
    node = broker.node
    assert node is not None
    start = node.broker.store.start
    found_log_bytes = log_bytes(broker.disk, start, end)
    if found_log_bytes != world.golden.data[start:end]:
        world.oracle.report_violation("agreement", f"the log of {broker.name} is another")
    if node.broker.store.confirmed < end:
        what = f"{broker.name} knows {node.broker.store.confirmed} of {end} confirmed bytes"
        world.oracle.report_violation("progress", what)
    slave = node.broker.store.slave
    if node is not master and slave is not None and slave.applied == master.broker.store.end:
        world.tally.hit(States.STATE_COMPARED)

        def differs(what: str) -> None:
            text = f"{broker.name} and its master: {what}"
            world.oracle.report_violation("I12 same-state", text)

        check = ReplayCheck(world.settings, ManualClock(), Judge(differs), set())
        check.compare(master.broker, node.broker)
