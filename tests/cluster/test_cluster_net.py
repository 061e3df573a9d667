"""The simulated network does what TCP and its breakdowns do, and no less."""

import random
from collections.abc import Callable

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.testing.cluster_world.host import Host
from popmq.testing.cluster_world.port import SimPort
from popmq.testing.cluster_world.sim_network import NetworkFaults, SimNet
from popmq.testing.cluster_world.sometimes_states import NetSometimes
from popmq.testing.cluster_world.timeline import HostClock, Timeline
from popmq.testing.harness.sometimes import StateCounts


class Echo:
    """Answers with what it was asked, at once or when it is told to."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.cancelled: list[int] = []
        self.held: dict[int, Callable[[], None]] | None = None

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self.asked.append(body)
        if body == b"refuse me":
            raise Refused(Code.FORBIDDEN, "no")
        if self.held is None:
            on_reply(body)
        else:
            self.held[len(self.asked)] = lambda: on_reply(body)
        return len(self.asked)

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)


class Net:
    """Two hosts, `a` asks and `b` serves."""

    def __init__(self, seed: int = 1, manners: NetworkFaults | None = None) -> None:
        rng = random.Random(seed)
        self.time = Timeline(rng)
        self.tally = StateCounts(NetSometimes)
        self.net = SimNet(self.time, rng, self.tally, manners or NetworkFaults())
        self.a, self.b = (Host(name, self.time, HostClock(self.time)) for name in "ab")
        self.server = Echo()
        for host in (self.a, self.b):
            host.boot()
        self.net.listen("b:1", self.b, self.server)
        self.port = SimPort(self.net, self.a, "b:1")
        self.heard: list[str] = []

    def ask(self, body: bytes, *, timeout_ms: int = 60_000, kind: Kind = Kind.REGISTER) -> int:
        return self.port.request(kind, body, timeout_ms, self.hear)

    def hear(self, answer: bytes | PopmqError) -> None:
        self.heard.append(answer.decode() if isinstance(answer, bytes) else answer.code.name)

    def run(self, ms: int = 1_000) -> None:
        self.time.run(self.time.now_ms + ms)


def test_requests_are_answered_in_the_order_they_were_made() -> None:
    net = Net()
    for number in range(50):
        net.ask(b"%d" % number)
    net.run()
    assert net.heard == [str(number) for number in range(50)]


def test_a_refusal_comes_back_as_a_refusal() -> None:
    net = Net()
    net.ask(b"refuse me")
    net.run()
    assert net.heard == ["FORBIDDEN"]


def test_an_unruly_network_reorders_loses_and_repeats() -> None:
    net = Net(manners=NetworkFaults(unruly=True, loss=0.1, twice=0.2, late=0.1))
    for number in range(200):
        net.ask(b"%d" % number, timeout_ms=20_000)
    net.run(30_000)
    assert len(net.heard) == 200
    assert net.heard.count("PROXY_TIMEOUT") > 5
    answered = [int(name) for name in net.heard if name.isdigit()]
    assert len(answered) == len(set(answered))
    assert answered != sorted(answered)
    assert len(net.server.asked) != len(set(net.server.asked))


def test_what_waits_at_a_cut_link_arrives_when_it_heals() -> None:
    net = Net(manners=NetworkFaults(patience_ms=8_000))
    net.ask(b"first")
    net.run()
    net.net.cut("a", "b")
    net.ask(b"second")
    net.run(1_500)
    assert net.heard == ["first"]
    net.net.heal("a", "b")
    net.run()
    assert net.heard == ["first", "second"]


def test_a_cut_in_one_direction_lets_the_request_arrive_and_not_its_answer() -> None:
    net = Net()
    net.ask(b"first")
    net.run()
    net.net.cut("b", "a")
    net.ask(b"second", timeout_ms=500)
    net.run()
    assert net.server.asked == [b"first", b"second"]
    assert net.heard == ["first", "PROXY_TIMEOUT"]


def test_after_long_silence_the_asker_gives_the_connection_up() -> None:
    net = Net(manners=NetworkFaults(patience_ms=8_000))
    net.run()
    net.net.cut("a", "b")
    net.ask(b"lost")
    net.run(10_000)
    assert net.heard == ["HA_NOT_AVAILABLE"]
    net.net.heal("a", "b")
    net.run(10_000)
    net.ask(b"again")
    net.run()
    assert net.heard[-1] == "again"


def test_an_answer_to_a_broken_connection_is_never_heard() -> None:
    net = Net()
    net.server.held = {}
    net.ask(b"slow")
    net.run()
    assert net.net.break_some(lambda connection: True) == 1
    net.run()
    net.server.held[1]()
    net.run()
    assert net.heard == ["HA_NOT_AVAILABLE"]
    assert net.server.cancelled == [1]


def test_a_dead_process_refuses_connections_until_it_is_back() -> None:
    net = Net()
    net.run()
    net.b.die()
    net.net.process_ended(net.b, quietly=False)
    net.run()
    net.ask(b"nobody")
    assert net.heard == ["HA_NOT_AVAILABLE"]
    net.b.boot()
    net.run(3_000)
    net.ask(b"back")
    net.run()
    assert net.heard[-1] == "back"


def test_a_machine_that_went_down_is_noticed_by_silence_only() -> None:
    net = Net()
    net.run()
    net.b.die(off=True)
    net.net.process_ended(net.b, quietly=True)
    net.ask(b"nobody", timeout_ms=400)
    net.run(500)
    assert net.heard == ["PROXY_TIMEOUT"]
    assert net.port.connected


def test_a_stopped_process_answers_when_it_goes_on() -> None:
    net = Net()
    net.run()
    net.b.pause()
    net.ask(b"wait", timeout_ms=30_000)
    net.run(20_000)
    assert net.heard == []
    net.b.resume()
    net.run()
    assert net.heard == ["wait"]


def test_what_a_process_had_open_is_over_with_it() -> None:
    net = Net()
    net.server.held = {}
    net.ask(b"mine")
    net.run()
    net.a.die()
    net.net.process_ended(net.a, quietly=False)
    net.a.boot()
    net.run()
    net.server.held[1]()
    net.run()
    assert net.heard == []
    assert net.server.cancelled == [1]


def test_clocks_drift_step_and_begin_anew() -> None:
    timeline = Timeline(random.Random(1))
    clock = HostClock(timeline, offset_ms=5_000, rate_ppm=100_000)
    boot = clock.boot_ms()
    timeline.run(10_000)
    assert clock.boot_ms() - boot == 11_000
    assert clock.error_ms == 6_000
    clock.set_rate(-100_000)
    timeline.run(20_000)
    assert clock.boot_ms() - boot == 20_000
    assert clock.true_ms(900) == 1_000
    clock.step_wall(-7_000)
    assert clock.error_ms == -2_000
    clock.reboot()
    assert clock.boot_ms() == 1_000


def test_a_connection_that_breaks_while_it_opens_is_opened_again() -> None:
    net = Net(manners=NetworkFaults(latency_ms=(5, 5)))
    net.run(7)  # accepted, and the news of that is on its way
    assert net.net.break_some(lambda connection: True) == 1
    net.run(3_000)
    net.ask(b"still there")
    net.run()
    assert net.heard == ["still there"]
