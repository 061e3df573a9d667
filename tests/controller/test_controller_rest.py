"""How long a controller may rest between steps: an idle one costs nothing, a needed one looks."""

import pytest
from controller.controller_rig import DEAD_MS, HEARTBEAT_MS, Broker, Rig, ScriptedPeer, ask, three

from popmq.common.errors import PopmqError
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import controller_pb2 as pb
from popmq.controller.controller import REST_MS, Controller, ControllerTimeouts
from popmq.controller.metadata_store import MemoryStore
from popmq.testing.harness.clock import ManualClock


def owned(*brokers: Broker) -> Rig:
    rig = Rig(*brokers)
    rig.beat()
    rig.run(DEAD_MS + HEARTBEAT_MS)
    return rig


def rest_ms(rig: Rig) -> int:
    return rig.controllers[0].wait_ms(rig.clock.boot_ms())


def single() -> Broker:
    return Broker("a", group="a", replicas=1, epoch=1, role=pb.MASTER)


def nobody(address: str) -> ScriptedPeer:
    return ScriptedPeer(None)


def test_a_controller_of_single_brokers_rests() -> None:
    assert rest_ms(owned(single())) == REST_MS


def test_a_controller_that_has_to_choose_an_owner_looks_often() -> None:
    rig = Rig(single())
    assert rest_ms(rig) == 0
    rig.beat()
    assert rest_ms(rig) == 0


def test_a_controller_of_replicas_looks_often() -> None:
    assert rest_ms(owned(*three())) == 0


def test_a_rest_ends_with_the_first_long_poll() -> None:
    rig = owned(single())
    answers: list[bytes | PopmqError] = []
    version = rig.controllers[0].routes.version
    asked = pb.RoutesRequest(known_version=version, wait_ms=REST_MS - 100).SerializeToString()
    rig.controllers[0].request(Kind.ROUTES, asked, 60_000, answers.append)
    assert rest_ms(rig) == REST_MS - 100
    rig.clock.advance(rest_ms(rig))
    rig.step()
    assert len(answers) == 1
    assert rest_ms(rig) == REST_MS


@pytest.mark.parametrize("dead_after_ms", [40, 2_000, 60_000])
def test_a_rest_is_not_taken_for_having_stood_still(
    dead_after_ms: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    times = ControllerTimeouts(heartbeat_ms=dead_after_ms // 2, dead_after_ms=dead_after_ms)
    controller = Controller("popmq", MemoryStore(), clock, nobody, times=times)
    ask(controller, Kind.REGISTER, single().heartbeat())
    while not controller.wait_ms(clock.boot_ms()):
        clock.advance(dead_after_ms // 4)
        controller.step(clock.boot_ms())
    clock.advance(controller.wait_ms(clock.boot_ms()))
    controller.step(clock.boot_ms())
    assert "stood still" not in caplog.text


def test_each_request_is_told_so_that_a_rest_can_end() -> None:
    reporteds: list[int] = []
    controller = Controller(
        "popmq",
        MemoryStore(),
        ManualClock(),
        nobody,
        times=ControllerTimeouts(),
        on_request=lambda: reporteds.append(1),
    )
    ask(controller, Kind.REGISTER, single().heartbeat())
    assert reporteds == [1]
