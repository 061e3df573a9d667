"""The controller as brokers and proxies ask it."""

import asyncio
import logging

import pytest

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.frame_port import call
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import ControllerSettings, Settings
from popmq.common.wire.controller_pb2 import (
    BrokerAddress,
    RegisterRequest,
    RoutesReply,
    RoutesRequest,
)
from popmq.controller.process import ControllerProcess

SETTINGS = Settings(controller=ControllerSettings(dead_after_ms=60_000))
KNOWN = BrokerAddress(broker="broker-a", address="h:1", epoch=1, store_id="1f")
LONG_MS = 60_000


async def register(controller: ControllerProcess, broker: BrokerAddress) -> None:
    request = RegisterRequest(cluster="popmq", broker=broker).SerializeToString()
    await call(controller.port, Kind.REGISTER, request, LONG_MS)


async def routes(controller: ControllerProcess, known_version: int) -> RoutesReply:
    request = RoutesRequest(known_version=known_version, wait_ms=LONG_MS).SerializeToString()
    return RoutesReply.FromString(await call(controller.port, Kind.ROUTES, request, LONG_MS))


async def test_a_proxy_that_followed_the_last_controller_is_told_by_the_next_one_at_once() -> None:
    before, after = ControllerProcess(SETTINGS), ControllerProcess(SETTINGS)
    await register(before, KNOWN)
    known = await routes(before, 0)
    moved = BrokerAddress(broker="broker-a", address="h:2", epoch=2, store_id="1f")
    await register(after, moved)
    # It would wait for a minute if both had counted to the same number.
    reply = await routes(after, known.version)
    assert list(reply.brokers) == [moved]


async def test_a_proxy_that_knows_the_routes_waits_for_the_next_change() -> None:
    controller = ControllerProcess(SETTINGS)
    known = await routes(controller, 0)
    waiting = asyncio.create_task(routes(controller, known.version))
    await register(controller, KNOWN)
    assert list((await waiting).brokers) == [KNOWN]


@pytest.mark.parametrize("kind", [Kind.REGISTER, Kind.ROUTES])
async def test_bytes_that_are_no_request_are_a_bad_request(kind: Kind) -> None:
    with pytest.raises(PopmqError, match=f"no {kind.name}") as caught:
        await call(ControllerProcess(SETTINGS).port, kind, b"\xff", LONG_MS)
    assert caught.value.code is Code.BAD_REQUEST


async def test_a_refused_broker_is_logged_once_however_often_it_tries(
    caplog: pytest.LogCaptureFixture,
) -> None:
    second = BrokerAddress(broker="broker-a", address="h:2", epoch=1, store_id="2e")

    async def test() -> None:
        controller = ControllerProcess(SETTINGS)
        await register(controller, KNOWN)
        for _ in range(3):
            with pytest.raises(PopmqError, match="two brokers are called broker-a"):
                await register(controller, second)

    with caplog.at_level(logging.WARNING):
        await test()
    (logged,) = caplog.records
    assert "store '2e' at h:2" in logged.__dict__["reason"]
