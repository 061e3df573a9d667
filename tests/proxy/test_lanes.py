"""Ordinary calls that come together: a lane does for them what the general path does for each."""

import random

import pytest
import sim_seeds
from proxy.lane_client import SEND, Client
from proxy.lane_world import Server, by_stream, run

from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.rpc.rpc import REPLY_RESERVE_MS
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.connection import LeanConnection

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


class Scene:
    """One client of one server, which answers when it is told to."""

    def __init__(self, *, lanes: bool = True, window: int = 1 << 20, coding: str = "plain") -> None:
        self.server = Server(lanes=lanes, names=("broker-a",))
        self.client = Client(random.Random(1), coding, ("60S",), unusual=False)
        self.client.unsent = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: window})
        self.sent = 0
        self.send()  # the topic is known from now on
        for _ in range(3):  # the topic is asked about first
            self.end_turn()
        self.server.proxy.metrics.calls_by_path.clear()

    @property
    def connection(self) -> LeanConnection:
        return self.server.connections[0]

    def send(self, body: bytes = b"x") -> int:
        """The number of its stream."""
        message = pb.Message(topic=pb.Resource(name="orders"), body=body)
        self.sent += 1
        message.system_properties.message_id = f"m{self.sent}"
        request = service.SendMessageRequest(messages=[message]).SerializeToString()
        self.client.call(SEND, request)
        return self.client.last_id

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


def test_a_call_that_came_in_pieces_is_served_by_itself() -> None:
    scene = Scene()
    scene.send()
    whole = scene.client.unsent
    scene.client.unsent = whole[:-1]
    scene.deliver()
    scene.client.unsent = whole[-1:]
    scene.end_turn()
    assert scene.calls() == (0, 1, 0)


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
