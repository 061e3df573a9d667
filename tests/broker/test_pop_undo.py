"""A receive whose client left before its reply did: its messages come back uncounted."""

from dataclasses import replace

import pytest

from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frame_server import FrameServer
from popmq.common.protocol.frames import Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.topics import CheckPoints, GroupType, MessageType
from popmq.common.wire import admin_pb2
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import Answer, CoreBroker, bodies, pop


def asked(core: CoreBroker, request: bytes) -> Answer:
    """A receive that popped, whose reply waits for the disk."""
    answer = core.ask(Kind.POP, request, settle=False)
    assert not answer.heard
    return answer


def leave(core: CoreBroker, answer: Answer) -> None:
    core.server.cancel(answer.id)
    core.run_until_idle()
    core.run_steps()


def attempts(deliveries: list[hop.Delivery]) -> list[tuple[bytes, int]]:
    return sorted((delivery.head, delivery.attempt) for delivery in deliveries)


def restart(core: CoreBroker) -> None:
    assert isinstance(core.disk, LyingDisk)
    core.disk.restore_power()
    core.start()


def test_a_receive_whose_client_left_before_the_reply_is_undone_without_counting(
    core: CoreBroker,
) -> None:
    for body in (b"one", b"two"):
        core.send("orders", body)
    answer = asked(core, pop("orders", "g"))
    leave(core, answer)
    assert not answer.heard
    assert attempts(core.receive("orders", "g")) == [(b"one", 1), (b"two", 1)]


def test_an_answer_that_crossed_with_the_cancel_is_undone_too(core: CoreBroker) -> None:
    core.send("orders", b"one")
    answer = core.ask(Kind.POP, pop("orders", "g"))
    assert answer.body is not None
    leave(core, answer)
    assert attempts(core.receive("orders", "g")) == [(b"one", 1)]


def test_undoing_twice_brings_a_message_back_once(core: CoreBroker) -> None:
    core.send("orders", b"one")
    answer = asked(core, pop("orders", "g"))
    core.server.cancel(answer.id)
    leave(core, answer)
    leave(core, answer)
    assert bodies(core.receive("orders", "g")) == [b"one"]
    core.advance(1_000)
    assert core.receive("orders", "g") == []


def test_what_was_acked_is_not_undone(core: CoreBroker) -> None:
    for body in (b"one", b"two"):
        core.send("orders", body, queue_id=0)
    answer = core.ask(Kind.POP, pop("orders", "g"))
    assert answer.body is not None
    delivery, _ = hop.decode_pop_reply(answer.body).deliveries
    assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
    leave(core, answer)
    assert bodies(core.receive("orders", "g")) == [b"two"]


def test_a_reset_of_what_was_changed_before_a_start_leaves_an_undone_receive_alone(
    core: CoreBroker,
) -> None:
    """The check point that a change took over waits for no time after the start (seed 20509)."""
    core.topic("others", queues=1)
    core.send("others", b"changed")
    (held,) = core.receive("others", "g")
    core.change("others", "g", held.handle, 3_600_000)
    core.stop()
    core.start()
    core.send("orders", b"one")
    core.server.cancel(asked(core, pop("orders", "g")).id)
    reset = admin_pb2.ResetOffsetRequest(group="g", topic="others", newest=True)
    core.ask(Kind.RESET_OFFSET, reset.SerializeToString())
    core.run_steps()
    assert attempts(core.receive("orders", "g")) == [(b"one", 1)]


def test_a_retry_that_nobody_saw_keeps_its_attempt(core: CoreBroker) -> None:
    core.send("orders", b"one")
    core.receive("orders", "g", invisible_ms=1_000)
    core.advance(1_100)
    leave(core, asked(core, pop("orders", "g")))
    assert attempts(core.receive("orders", "g")) == [(b"one", 2)]


def test_a_last_attempt_that_nobody_saw_makes_no_dead_letter(core: CoreBroker) -> None:
    core.group("once", max_attempts=1)
    core.send("orders", b"one")
    leave(core, asked(core, pop("orders", "once")))
    assert attempts(core.receive("orders", "once", invisible_ms=1_000)) == [(b"one", 1)]
    core.advance(1_100)
    assert core.receive("orders", "once") == []
    assert bodies(core.receive("%DLQ%once", "g")) == [b"one"]


def test_a_push_consumers_receive_is_undone_although_the_client_lives(core: CoreBroker) -> None:
    core.send("orders", b"one")
    leave(core, asked(core, pop("orders", "g", auto_renew=True)))
    assert attempts(core.receive("orders", "g")) == [(b"one", 1)]


def test_a_waiting_receive_that_left_while_its_answer_was_made_durable_is_undone(
    core: CoreBroker,
) -> None:
    answer = core.ask(Kind.POP, pop("orders", "g", poll_ms=10_000))
    entry = hop.PutEntry(MessageType.NORMAL, b"one", b"")
    core.ask(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])), settle=False)
    while not core.broker.table.in_flight:
        core.tick()
    assert not answer.heard
    leave(core, answer)
    assert not answer.heard
    assert attempts(core.receive("orders", "g")) == [(b"one", 1)]


def test_an_undone_receive_wakes_who_waits(core: CoreBroker) -> None:
    core.send("orders", b"one")
    first = asked(core, pop("orders", "g"))
    waiting = core.ask(Kind.POP, pop("orders", "g", poll_ms=10_000))
    leave(core, first)
    assert waiting.body is not None
    assert attempts(list(hop.decode_pop_reply(waiting.body).deliveries)) == [(b"one", 1)]


@pytest.fixture
def fifo(core: CoreBroker) -> CoreBroker:
    """A FIFO group `f` with two messages of one message group."""
    core.topic("steps", type=MessageType.FIFO)
    core.group("f", type=GroupType.FIFO)
    for body in (b"a1", b"a2"):
        core.send("steps", body, message_group="a")
    return core


@pytest.mark.parametrize("cut", [False, True])
def test_a_fifo_groups_messages_come_back_in_their_place_uncounted(
    fifo: CoreBroker, cut: bool
) -> None:
    leave(fifo, asked(fifo, pop("steps", "f")))
    fifo.send("steps", b"a3", message_group="a")
    if cut:
        restart(fifo)
    again = fifo.receive("steps", "f", invisible_ms=1_000)
    assert [(delivery.head, delivery.attempt) for delivery in again] == [
        (b"a1", 1),
        (b"a2", 1),
        (b"a3", 1),
    ]
    fifo.advance(1_100)
    assert [delivery.attempt for delivery in fifo.receive("steps", "f")] == [2, 2, 2]


def test_what_the_same_attempt_id_got_again_is_not_undone_with_the_first_receive(
    fifo: CoreBroker,
) -> None:
    first = asked(fifo, pop("steps", "f", attempt_id="x"))
    again = fifo.receive("steps", "f", attempt_id="x")
    assert bodies(again) == [b"a1", b"a2"]
    leave(fifo, first)
    assert fifo.receive("steps", "f") == []
    results = fifo.ack("steps", "f", *(delivery.handle for delivery in again))
    assert [result.code for result in results] == [Code.OK, Code.OK]


def test_a_receive_of_a_buffered_group_is_undone(core: CoreBroker) -> None:
    core.group("b", check_points=CheckPoints.BUFFERED)
    core.send("orders", b"one")
    answer = core.ask(Kind.POP, pop("orders", "b"), settle=False)
    leave(core, answer)
    assert attempts(core.receive("orders", "b")) == [(b"one", 1)]
    assert core.receive("orders", "b") == []


def test_after_a_crash_between_pop_and_undo_the_message_expires_as_ever(core: CoreBroker) -> None:
    core.send("orders", b"one")
    answer = core.ask(Kind.POP, pop("orders", "g", invisible_ms=5_000))
    core.server.cancel(answer.id)
    restart(core)
    core.run_steps()
    assert core.receive("orders", "g") == []
    core.advance(5_100)
    assert attempts(core.receive("orders", "g")) == [(b"one", 2)]


def test_an_undo_that_is_durable_survives_a_crash(core: CoreBroker) -> None:
    core.send("orders", b"one")
    leave(core, core.ask(Kind.POP, pop("orders", "g")))
    restart(core)
    assert attempts(core.receive("orders", "g")) == [(b"one", 1)]
    core.advance(120_000)
    assert attempts(core.receive("orders", "g")) == [(b"one", 2)]


def test_a_dead_letter_does_not_count_an_undone_receive_as_its_first_delivery(
    core: CoreBroker,
) -> None:
    core.group("once", max_attempts=1)
    core.send("orders", b"one")
    leave(core, asked(core, pop("orders", "once")))
    core.advance(50_000)
    seen_ms = core.broker.store.log_ms()
    (delivery,) = core.receive("orders", "once")
    assert core.reject("orders", "once", delivery.handle).code == Code.OK
    (letter,) = core.broker.store.reader.read(
        core.broker.store.queue(core.broker.registry.topic("%DLQ%once").id, 0).units(0, 1)
    )
    assert letter.token.first_log_ms == seen_ms  # type: ignore[union-attr]


async def test_a_receive_is_undone_when_the_connection_of_its_proxy_broke_before_the_reply(
    core: CoreBroker,
) -> None:
    core.send("orders", b"one")

    hello = Hello(role=ProcessRole.BROKER, name="b", cluster="blue")
    server = FrameServer(core.server, hello)
    bound = await server.listen("127.0.0.1:0")
    port = FramePort(bound, replace(hello, role=ProcessRole.PROXY, name="p"))
    port.start()
    port.request(Kind.POP, pop("orders", "g"), 60_000, lambda _: None)
    # What comes behind it is answered at once, so the pop was served by then.
    await call(port, Kind.CLIENTS, hop.encode_clients(hop.ClientsReport()), 60_000)
    assert core.broker.table.in_flight == 1
    await port.close()
    await server.stop()

    core.run_until_idle()
    core.run_steps()
    assert attempts(core.receive("orders", "g")) == [(b"one", 1)]
