"""Ordinary calls that come together: a lane does for them what the general path does for each."""

import random
from dataclasses import replace

import pytest
import sim_seeds
from proxy.lane_client import ACK, GROUP, SEND, Client, framed
from proxy.lane_world import FEW_STREAMS, Server, by_stream, run
from proxy.send_requests import NOW_MS

from popmq.common.settings.settings import Settings
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.messaging.ack import MAX_HANDLES
from popmq.proxy.rpc.rpc import REPLY_RESERVE_MS
from popmq.proxy.rpc.wire_scan import chunk
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.connection import LeanConnection
from popmq.proxy.transport.lean.outbox import Outbox

TURNS = 600


def test_a_lane_and_the_general_path_answer_alike_and_leave_the_same_log() -> None:
    calls = run(random.randrange(1 << 32), TURNS)
    for path, least in (("lane", TURNS / 10), ("single", TURNS / 20), ("general", TURNS / 10)):
        assert sum(count for name, count in calls.items() if name.endswith(path)) > least


@pytest.mark.more
def test_lanes_of_the_day_do_what_the_general_path_does() -> None:
    """As `python -m proxy.lane_world` does with more turns."""
    (day, *_) = sim_seeds.of_the_day(1)
    run(day * 1_000, 5_000)


NAMES = service.AckMessageRequest(
    group=pb.Resource(name=GROUP), topic=pb.Resource(name="orders")
).SerializeToString()


class Scene:
    """One client of one server, which answers when it is told to."""

    def __init__(
        self,
        *,
        lanes: bool = True,
        window: int = 1 << 20,
        coding: str = "plain",
        settings: Settings = FEW_STREAMS,
        tight: bool = False,
        beside: "Scene | None" = None,
    ) -> None:
        """`beside` is another client of the same server."""
        self.server: Server = (
            beside.server
            if beside
            else Server(lanes=lanes, names=("broker-a",), settings=settings, tight=tight)
        )
        self._number: int = beside._number + 1 if beside else 0
        self.client = Client(random.Random(1), coding, ("60S",), unusual=False)
        self.client.unsent = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: window})
        self.sent = 0
        self.send()  # the topic is known from now on
        for _ in range(3):  # the topic is asked about first
            self.end_turn()
        self.server.proxy.metrics.calls_by_path.clear()

    @property
    def connection(self) -> LeanConnection:
        return self.server.connections[self._number]

    def send(self, body: bytes = b"x") -> int:
        """The number of its stream."""
        message = pb.Message(topic=pb.Resource(name="orders"), body=body)
        self.sent += 1
        message.system_properties.message_id = f"{'mnop'[self._number]}{self.sent}"
        request = service.SendMessageRequest(messages=[message]).SerializeToString()
        self.client.call(SEND, request)
        return self.client.last_id

    def ack(self, *entries: service.AckMessageEntry, names: bytes = NAMES) -> None:
        tail = service.AckMessageRequest(entries=entries).SerializeToString()
        self.client.call(ACK, names + tail)

    def handles(self, count: int) -> list[str]:
        """Of messages that were sent now."""
        core = self.server.ports["broker-a"].core
        for number in range(count):
            core.send("orders", b"%d" % number)
        return [delivery.handle.decode() for delivery in core.receive("orders", GROUP, limit=count)]

    def deliver(self) -> None:
        client = self.client
        data, client.unsent, client.later = client.unsent + client.later, b"", b""
        self.connection.receive(data, self.server.clock.boot_ms())

    def answers(self) -> dict[int, list[frames.Frame]]:
        return by_stream(self.connection.outbox.take())

    def end_turn(self) -> dict[int, list[frames.Frame]]:
        self.deliver()
        self.server.end_turn()
        self.server.serve()
        return self.answers()

    def calls(self) -> tuple[int, int, int]:
        """Those of a lane's runs, those that a lane took alone, those of the general path."""
        lane, single, general = map(self.server.calls, ("lane", "single", "general"))
        return lane, single, general


def status(answer: list[frames.Frame]) -> service.SendMessageResponse:
    content = b"".join(payload for kind, _, _, payload in answer if kind == frames.DATA)
    return service.SendMessageResponse.FromString(content[5:])


def kinds(answer: list[frames.Frame]) -> list[int]:
    return [kind for kind, _, _, _ in answer]


@pytest.mark.parametrize("coding", ["plain", "huffman", "indexed"])
def test_calls_with_headers_that_change_take_the_lane(coding: str) -> None:
    scene = Scene(coding=coding)
    sent = [scene.send() for _ in range(20)]
    answers = scene.end_turn()
    assert scene.calls() == (20, 0, 0)
    assert [status(answers[number]).entries[0].message_id for number in sent] == [
        f"m{number}" for number in range(2, 22)
    ]


def test_calls_of_a_client_that_widens_its_windows_with_each_take_the_lane() -> None:
    scene = Scene()
    scene.client.widens = True
    sent = [scene.send() for _ in range(20)]
    window = scene.connection.outbox.window
    answers = scene.end_turn()
    assert scene.calls() == (20, 0, 0)
    assert set(answers) == set(sent)
    assert scene.connection.outbox.window > window - 20 * 100 + 20


def test_calls_whose_headers_come_before_all_their_data_take_the_lane() -> None:
    scene = Scene()
    scene.client.gathers = True
    sent = [scene.send() for _ in range(20)]
    assert scene.client.later
    answers = scene.end_turn()
    assert scene.calls() == (20, 0, 0)
    assert set(answers) == set(sent)


def test_a_window_that_a_call_widened_is_that_of_its_stream() -> None:
    scene = Scene(window=0)
    scene.client.widens = True
    number = scene.send()
    sizes = [len(payload) for kind, _, _, payload in scene.end_turn()[number]]
    assert scene.calls() == (1, 0, 0)
    assert len(sizes) > 1
    assert sum(sizes[1:]) in (1, 5, 300)


def test_without_lanes_every_call_takes_the_general_path() -> None:
    scene = Scene(lanes=False)
    scene.send()
    assert len(scene.end_turn()) == 1
    assert scene.calls() == (0, 0, 1)


def test_while_there_are_users_every_call_is_checked_by_itself() -> None:
    scene = Scene()
    scene.server.proxy.access.active = True
    scene.send()
    (answer,) = scene.end_turn().values()
    assert status(answer).status.code == pb.Code.HA_NOT_AVAILABLE  # it knows no users yet
    assert scene.calls() == (0, 0, 0)  # its path is counted behind the check


@pytest.mark.parametrize("part", [0.05, 0.5, 0.95])
def test_a_call_that_was_cut_anywhere_takes_the_lane(part: float) -> None:
    scene = Scene()
    scene.send()
    whole = scene.client.unsent
    cut = int(len(whole) * part)
    scene.client.unsent = whole[:cut]
    scene.deliver()
    scene.client.unsent = whole[cut:]
    assert len(scene.end_turn()) == 1
    assert scene.calls() == (1, 0, 0)


def test_a_call_whose_message_is_in_two_frames_is_served_by_itself() -> None:
    scene = Scene()
    scene.client.call(SEND, b"")
    scene.client.unsent = b""
    request = sent("a")
    head = scene.client._headers(scene.client.block(SEND))
    number, content = scene.client.last_id, framed(request)
    first = frames.frame(frames.DATA, 0, number, content[:9])
    scene.client.unsent = head + first + frames.frame(frames.DATA, 1, number, content[9:])
    assert len(scene.end_turn()) == 1
    assert scene.calls() == (0, 1, 0)


def sent(message_id: str) -> bytes:
    message = pb.Message(topic=pb.Resource(name="orders"), body=b"x")
    message.system_properties.message_id = message_id
    return service.SendMessageRequest(messages=[message]).SerializeToString()


def split(scene: Scene, count: int) -> tuple[bytes, bytes]:
    """The HEADERS of so many sends, and their DATA."""
    scene.client.gathers = True
    for _ in range(count):
        scene.send()
    heads, data = scene.client.unsent, scene.client.later
    scene.client.unsent = scene.client.later = b""
    return heads, data


def test_calls_whose_data_comes_with_the_next_read_take_the_lane() -> None:
    scene = Scene()
    scene.client.unsent, data = split(scene, 5)
    assert scene.end_turn() == {}
    assert scene.connection.streams == {}
    assert scene.server.counters.streams == 5
    scene.client.unsent = data
    assert len(scene.end_turn()) == 5
    assert scene.calls() == (5, 0, 0)
    assert scene.server.counters.streams == 0


def test_a_call_that_waits_for_its_data_has_its_time_from_its_headers_on() -> None:
    scene = Scene()
    scene.client.timeouts = ("2000m",)
    scene.client.unsent, data = split(scene, 2)
    scene.deliver()
    scene.server.advance(600)
    port = scene.server.ports["broker-a"]
    port.timeouts_ms.clear()
    scene.client.unsent = data
    scene.deliver()
    scene.server.end_turn()
    assert port.timeouts_ms == [1_400 - REPLY_RESERVE_MS]
    scene.server.advance(1_401)
    scene.connection.tick(scene.server.clock.boot_ms())
    answers = scene.answers()
    assert len(answers) == 2
    assert all(b"grpc-status\x014" in answer[0][3] for answer in answers.values())


@pytest.mark.parametrize("timeout", ["", "20000000H"])
def test_calls_without_a_limit_of_time_take_the_lane_and_become_streams(timeout: str) -> None:
    scene = Scene()
    scene.client.timeouts = (timeout,)
    scene.send()
    scene.deliver()
    scene.connection.tick(scene.server.clock.boot_ms())
    assert len(scene.connection.streams) == 1
    assert len(scene.end_turn()) == 1
    assert scene.calls() == (1, 0, 0)


def test_calls_that_wait_for_their_data_become_streams_at_a_tick() -> None:
    scene = Scene()
    scene.client.timeouts = ("5000m",)
    scene.client.unsent, data = split(scene, 2)
    scene.deliver()
    scene.server.advance(3_000)
    scene.connection.tick(scene.server.clock.boot_ms())
    assert len(scene.connection.streams) == scene.server.counters.streams == 2
    scene.server.advance(2_001)
    scene.connection.tick(scene.server.clock.boot_ms())
    assert len(scene.answers()) == 2
    scene.client.unsent = data
    scene.end_turn()
    assert scene.calls() == (0, 0, 0)


def test_calls_that_wait_for_their_data_end_with_their_connection() -> None:
    scene = Scene()
    scene.client.unsent, _ = split(scene, 2)
    scene.deliver()
    scene.connection.lost()
    assert scene.server.counters.streams == 0


def test_users_that_come_between_headers_and_data_are_asked_for() -> None:
    scene = Scene()
    scene.client.unsent, scene.client.later = split(scene, 1)
    data, scene.client.later = scene.client.later, b""
    scene.deliver()
    scene.server.proxy.access.active = True
    scene.client.unsent = data
    (answer,) = scene.end_turn().values()
    assert status(answer).status.code == pb.Code.HA_NOT_AVAILABLE  # it knows no users yet
    assert scene.calls() == (0, 0, 0)


def test_calls_of_netty_take_the_lane() -> None:
    """Their HEADERS have a priority, and those of a receive stand between them."""
    scene = Scene()
    client = scene.client
    client.prioritizes = client.gathers = True
    scene.send()
    client.receive()
    scene.send()
    heads, data = client.unsent, client.later
    (of_receive,) = (at for at in frames_of(data) if at[2] == client.last_id - 2)
    data = frames.frame(*of_receive) + b"".join(
        frames.frame(*frame) for frame in frames_of(data) if frame != of_receive
    )
    client.unsent, client.later = heads, b""
    scene.deliver()
    client.unsent = data
    assert len(scene.end_turn()) >= 2
    assert scene.calls() == (2, 0, 0)


def frames_of(data: bytes) -> list[frames.Frame]:
    return list(frames.Http2FrameReader(1 << 24).feed(data))


def test_data_that_is_more_than_the_window_of_the_connection_is_a_fault_as_without_lanes() -> None:
    lean = replace(FEW_STREAMS.lean, connection_window_bytes=65_535, max_frame_bytes=16_384)
    answers = []
    for lanes in (True, False):
        scene = Scene(lanes=lanes, settings=replace(FEW_STREAMS, lean=lean))
        for _ in range(6):
            scene.send(bytes(14_000))
        answers.append(scene.end_turn())
        assert scene.connection.closing
    assert answers[0] == answers[1]


def test_calls_whose_times_are_far_apart_are_requests_of_their_own() -> None:
    scene = Scene()
    port = scene.server.ports["broker-a"]
    for timeout in ("5000m", "3000m"):
        scene.client.timeouts = (timeout,)
        scene.send()
    port.timeouts_ms.clear()
    scene.deliver()
    scene.server.end_turn()
    assert port.timeouts_ms == [5_000 - REPLY_RESERVE_MS, 3_000 - REPLY_RESERVE_MS]
    assert scene.calls() == (2, 0, 0)


def test_more_acks_than_one_request_takes_are_two_requests() -> None:
    many = replace(FEW_STREAMS, lean=replace(FEW_STREAMS.lean, max_streams=2_000))
    scene = Scene(settings=many)
    (handle,) = scene.handles(1)
    for _ in range(MAX_HANDLES + 1):
        scene.ack(service.AckMessageEntry(message_id="m", receipt_handle=handle))
    scene.server.asked.clear()
    scene.deliver()
    scene.server.end_turn()
    assert len(scene.server.asked) == 2
    scene.server.serve()
    assert len(scene.answers()) == MAX_HANDLES + 1
    assert scene.calls() == (MAX_HANDLES + 1, 0, 0)


def test_while_no_broker_is_known_the_general_path_has_the_answer() -> None:
    scene = Scene()
    scene.server.brokers.without_route = ("broker-a",)
    scene.send()
    (answer,) = scene.end_turn().values()
    assert status(answer).status.code == pb.Code.HA_NOT_AVAILABLE
    assert scene.calls() == (0, 0, 1)


def test_acks_that_no_library_writes_take_the_general_path() -> None:
    scene = Scene()
    (handle,) = scene.handles(1)
    good = service.AckMessageEntry(message_id="m", receipt_handle=handle)
    scene.ack(good)
    scene.end_turn()
    assert scene.calls() == (1, 0, 0)
    # Its id ends with what looks like the tag of a handle of 18 bytes.
    looks = service.AckMessageEntry(message_id="m" * 127 + "\x12", receipt_handle="h" * 17)
    by_hand = [chunk(3, b"lite") + chunk(2, handle.encode()), chunk(1, b"m") + chunk(2, b"")]
    requests = [
        NAMES + chunk(3, looks.SerializeToString()),
        *(NAMES + chunk(3, entry) for entry in by_hand),
        NAMES + chunk(3, chunk(1, b"m") + chunk(2, b"h" * 513)),
        NAMES + chunk(3, chunk(1, b"m") + chunk(2, b"\xc3\xa9" * 9)),
        NAMES + chunk(3, chunk(1, b"") + chunk(2, handle.encode())),
        # An entry in the place of a name.
        chunk(1, chunk(2, GROUP.encode())) + chunk(3, chunk(1, b"m")) + chunk(3, b""),
        NAMES[: 2 + NAMES[1]]
        + chunk(3, chunk(1, b"m") + chunk(2, b"x"))
        + chunk(3, good.SerializeToString()),
    ]
    for request in requests:
        scene.client.call(ACK, request)
        scene.end_turn()
    assert scene.calls() == (1, 0, len(requests))


def test_a_message_that_its_broker_refuses_alone_is_refused_alone() -> None:
    scene = Scene(tight=True)
    small, large = scene.send(), scene.send(bytes(12_000))
    answers = scene.end_turn()
    assert status(answers[small]).status.code == pb.Code.OK
    assert status(answers[large]).status.code == pb.Code.PAYLOAD_TOO_LARGE
    assert scene.calls() == (2, 0, 0)


@pytest.mark.parametrize("first", [pb.MessageType.DELAY, pb.MessageType.TRANSACTION])
def test_what_was_sent_before_as_another_type_gets_the_receipt_of_that(
    first: "pb.MessageType.ValueType",
) -> None:
    scene = Scene()
    message = pb.Message(topic=pb.Resource(name="mixed"), body=b"x")
    system = message.system_properties
    system.message_id, system.message_type = "m", first
    if first == pb.MessageType.DELAY:
        system.delivery_timestamp.FromMilliseconds(NOW_MS + 60_000)
    receipts = []
    for _ in range(2):
        request = service.SendMessageRequest(messages=[message]).SerializeToString()
        scene.client.call(SEND, request)
        scene.end_turn()
        scene.end_turn()
        scene.client.call(SEND, request)
        (answer,) = scene.end_turn().values()
        receipts.append(status(answer).entries[0])
        system.message_type = pb.MessageType.NORMAL
        system.ClearField("delivery_timestamp")
    assert receipts[0] == receipts[1]
    assert receipts[0].recall_handle or receipts[0].transaction_id
    assert scene.calls()[0] > 0


def test_a_fault_while_answers_are_written_ends_the_calls_that_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    first, second = scene.send(), scene.send()
    write = Outbox.unary_without_stream
    written: list[int] = []

    def fails(outbox: Outbox, stream_id: int, message: bytes) -> bool:
        if written:
            raise RuntimeError("a fault of ours")
        written.append(stream_id)
        return write(outbox, stream_id, message)

    monkeypatch.setattr(Outbox, "unary_without_stream", fails)
    answers = scene.end_turn()
    assert written == [first]
    assert b"grpc-status\x0213" in answers[second][0][3]


def test_a_client_that_resets_a_call_of_a_lane_gets_no_answer_to_it_and_the_others_do() -> None:
    scene = Scene()
    first, second = scene.send(), scene.send()
    scene.deliver()
    assert scene.connection.streams == {}
    scene.client.unsent = frames.reset(first, 8)
    answers = scene.end_turn()
    assert scene.calls() == (2, 0, 0)
    assert list(answers) == [second]
    assert scene.server.counters.streams == 0


def test_a_request_to_a_broker_is_given_up_when_all_calls_of_the_lane_are_reset() -> None:
    scene = Scene()
    numbers = [scene.send(), scene.send()]
    scene.deliver()
    scene.server.end_turn()
    port = scene.server.ports["broker-a"]
    scene.client.unsent = frames.reset(numbers[0], 8)
    scene.deliver()
    assert len(port.waiting) == 1
    scene.client.unsent = frames.reset(numbers[1], 8)
    scene.deliver()
    assert port.waiting == {}


def test_a_call_of_a_lane_ends_at_its_deadline() -> None:
    scene = Scene()
    number = scene.send()
    scene.deliver()
    scene.server.advance(61_000)
    scene.connection.tick(scene.server.clock.boot_ms())
    scene.connection.tick(scene.server.clock.boot_ms())
    (answer,) = scene.answers()[number]
    assert b"grpc-status\x014" in answer[3]
    scene.server.end_turn()
    scene.server.serve()
    assert scene.answers() == {}


def test_an_answer_that_does_not_fit_the_window_waits_for_it() -> None:
    scene = Scene(window=20)
    number = scene.send()
    assert kinds(scene.end_turn()[number]) == [frames.HEADERS, frames.DATA]
    scene.client.unsent = frames.window_update(number, 1_000)
    scene.deliver()
    assert kinds(scene.answers()[number]) == [frames.DATA, frames.HEADERS]
    assert scene.calls() == (1, 0, 0)


def test_calls_of_a_lane_count_for_the_limit_of_streams() -> None:
    scene = Scene()
    limit = scene.server.limits.max_streams
    numbers = [scene.send() for _ in range(limit + 1)]
    answers = scene.end_turn()
    assert kinds(answers[numbers[-1]]) == [frames.RST_STREAM]
    assert scene.calls() == (limit, 0, 0)
    assert scene.server.counters.cut_off["streams"] == 1


def test_a_connection_that_drains_answers_what_its_lane_took() -> None:
    scene = Scene()
    number = scene.send()
    scene.deliver()
    scene.connection.drain("it is time")
    assert not scene.connection.done
    assert number in scene.end_turn()
    assert scene.connection.done


def test_a_broker_that_breaks_a_request_ends_its_calls_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    number = scene.send()
    scene.deliver()
    port = scene.server.ports["broker-a"]
    scene.server.end_turn()
    for asked in port.waiting.values():
        asked.on_reply(b"\0\0")  # no result at all
    port.waiting.clear()
    (answer,) = scene.answers()[number]
    assert b"grpc-status\x0213" in answer[3]
    scene.send()
    assert len(scene.end_turn()) == 1


def test_a_request_to_a_broker_has_the_shortest_time_of_the_calls_of_a_lane() -> None:
    scene = Scene()
    port = scene.server.ports["broker-a"]
    for timeout in ("5000m", "4900m", "5050m"):
        scene.client.timeouts = (timeout,)
        scene.send()
    scene.deliver()
    port.timeouts_ms.clear()
    scene.server.end_turn()
    assert port.timeouts_ms == [4_900 - REPLY_RESERVE_MS]
    assert scene.calls() == (3, 0, 0)
