"""grpc.health.v1 and reflection, as probes and grpcurl ask, over both transports."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from proxy.test_transports import Make, make, serving

from popmq.proxy.rpc.health import HEALTH, Health
from popmq.proxy.rpc.reflection import VERSIONS, Reflection
from popmq.proxy.rpc.wire_scan import chunk, fields, scalar

SERVICE = "apache.rocketmq.v2.MessagingService"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = (scalar(1, number) for number in (1, 2, 3))

__all__ = ["make"]  # the fixture


def request(service: str) -> bytes:
    return chunk(1, service.encode()) if service else b""


@asynccontextmanager
async def health(make: Make, is_ready: Callable[[], bool]) -> AsyncIterator[Any]:
    async with serving(make, *Health(is_ready, (SERVICE,)).methods()) as channel:
        yield channel


@pytest.mark.parametrize("service", ["", SERVICE])
@pytest.mark.parametrize(("ready", "answer"), [(True, SERVING), (False, NOT_SERVING)])
async def test_a_check_answers_as_the_proxy_is(
    make: Make, service: str, ready: bool, answer: bytes
) -> None:
    async with health(make, lambda: ready) as channel:
        check = channel.unary_unary(HEALTH + "Check")
        assert await check(request(service), timeout=10) == answer


async def test_a_check_of_another_service_is_not_found(make: Make) -> None:
    async with health(make, lambda: True) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(HEALTH + "Check")(request("other"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(HEALTH + "Check")(b"\x0a\xff", timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_watch_says_the_status_now_and_when_it_changes(make: Make) -> None:
    state = [True]
    async with health(make, lambda: state[0]) as channel:
        watch = channel.unary_stream(HEALTH + "Watch")
        call, other = watch(request("")), watch(request("other"))
        assert await asyncio.wait_for(call.read(), 10) == SERVING
        assert await asyncio.wait_for(other.read(), 10) == SERVICE_UNKNOWN
        state[0] = False
        assert await asyncio.wait_for(call.read(), 10) == NOT_SERVING
        call.cancel()
        other.cancel()


@pytest.mark.parametrize("version", VERSIONS)
async def test_reflection_lists_the_service_and_gives_its_files(make: Make, version: str) -> None:
    async with serving(make, *Reflection().methods()) as channel:
        path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
        call = channel.stream_stream(path)()

        async def ask(number: int, text: str) -> dict[int, bytes]:
            await call.write(chunk(number, text.encode()))
            reply = await asyncio.wait_for(call.read(), 10)
            return {field.number: reply[field.content : field.end] for field in fields(reply)}

        services = (await ask(7, ""))[6]
        assert services == chunk(1, chunk(1, SERVICE.encode()))
        by_symbol = (await ask(4, SERVICE))[4]
        files = [
            FileDescriptorProto.FromString(by_symbol[field.content : field.end])
            for field in fields(by_symbol)
        ]
        assert files[0].service[0].name == "MessagingService"
        assert files[0].package == "apache.rocketmq.v2"
        pool = DescriptorPool()
        added: set[str] = set()
        while len(added) < len(files):
            for file in files:
                if file.name not in added and added >= set(file.dependency):
                    pool.Add(file)
                    added.add(file.name)
        send = pool.FindMethodByName(f"{SERVICE}.SendMessage")
        assert send.input_type.full_name == "apache.rocketmq.v2.SendMessageRequest"
        given = {file.name for file in files}
        assert given >= {name for file in files for name in file.dependency}
        assert (await ask(3, files[0].name))[4] == by_symbol
        assert 7 in await ask(4, "popmq.admin.v1.Admin")
        assert 7 in await ask(3, "nothing.proto")
        await call.done_writing()
