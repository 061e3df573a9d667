"""Connections that reach their age: two GOAWAYs, calls that finish, and a grace."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from proxy.lean.peer import Held, Peer, echo

from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.transport.interface import Method, MethodType
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.connection_timeouts import RETIRING_MS
from popmq.proxy.transport.lean.frames import ErrorCode
from popmq.proxy.transport.lean.server import AGE_JITTER, LeanTransport

AGE_MS = 100_000


def aged(grace_ms: int = 60_000) -> Peer:
    """A peer whose connection has just passed its age, with one call in progress."""
    peer = Peer(max_age_ms=AGE_MS, max_age_grace_ms=grace_ms)
    peer.call("/s/held", b"")
    peer.core.tick(peer.now_ms + AGE_MS)
    peer.read()
    assert peer.goaway is None
    peer.now_ms += AGE_MS + 1
    peer.core.tick(peer.now_ms)
    peer.read()
    return peer


def last_stream(peer: Peer) -> int:
    return int.from_bytes(peer.of_kind(frames.GOAWAY)[-1][3][:4], "big")


def answer_ping(peer: Peer) -> None:
    peer.send(frames.ping(peer.of_kind(frames.PING)[-1][3], ack=True))
    peer.read()


def test_the_first_goaway_lets_calls_that_are_on_their_way_arrive() -> None:
    peer = aged()
    assert peer.goaway == (ErrorCode.NO_ERROR, "the connection is old (lean.max_age_ms)")
    assert last_stream(peer) == frames.MAX_STREAM_ID
    on_its_way = peer.call("/s/echo", b"hello")
    peer.read()
    assert peer.answers[on_its_way].status == "0"
    answer_ping(peer)
    assert last_stream(peer) == on_its_way
    assert len(peer.of_kind(frames.GOAWAY)) == 2
    assert not peer.core.done
    peer.held.calls[0].send(b"x")
    peer.held.calls[0].finish()
    assert peer.core.done
    assert peer.counters.aged == 1
    assert not peer.counters.cut_off


def test_a_server_that_stops_takes_the_calls_that_are_on_their_way() -> None:
    peer = Peer()
    peer.core.retire("the server stops")
    peer.read()
    assert peer.goaway == (ErrorCode.NO_ERROR, "the server stops")
    assert last_stream(peer) == frames.MAX_STREAM_ID
    on_its_way = peer.call("/s/echo", b"hello")
    peer.read()
    assert peer.answers[on_its_way].status == "0"
    assert not peer.core.done
    answer_ping(peer)
    assert last_stream(peer) == on_its_way
    assert peer.core.done


def test_a_connection_without_settings_is_not_waited_for_when_the_server_stops() -> None:
    peer = Peer(greet=False)
    peer.core.retire("the server stops")
    assert peer.core.done


def test_a_call_behind_the_second_goaway_is_not_looked_at() -> None:
    peer = aged()
    answer_ping(peer)
    late = peer.call("/s/echo", b"hello")
    peer.read()
    assert late > last_stream(peer)
    assert late not in peer.answers


def test_a_client_that_does_not_answer_gets_the_second_goaway_all_the_same() -> None:
    peer = aged()
    peer.core.tick(peer.now_ms + RETIRING_MS)
    peer.read()
    assert not peer.core.draining
    peer.core.tick(peer.now_ms + RETIRING_MS + 1)
    peer.read()
    assert last_stream(peer) == 1
    assert peer.core.draining


def test_calls_without_an_end_are_ended_when_the_grace_is_over() -> None:
    peer = aged(grace_ms=20_000)
    answer_ping(peer)
    peer.core.tick(peer.now_ms + 20_000)
    assert not peer.held.gone
    peer.core.tick(peer.now_ms + 20_001)
    peer.read()
    assert len(peer.held.gone) == 1
    assert peer.answers[1].status == "14"
    assert "lean.max_age_grace_ms" in peer.answers[1].headers[-1]["grpc-message"]
    assert peer.core.done


def test_without_the_setting_a_connection_grows_as_old_as_it_likes() -> None:
    peer = Peer()
    peer.call("/s/held", b"")
    peer.core.tick(peer.now_ms + 10)
    peer.read()
    assert peer.goaway is None


def test_connections_that_came_together_do_not_go_together() -> None:
    transport = LeanTransport([], "127.0.0.1", 0, limits=replace(LeanSettings(), max_age_ms=10_000))
    ages = [transport.max_age_ms() for _ in range(1_000)]
    assert min(ages) < 10_000 * (1 - AGE_JITTER / 2)
    assert max(ages) > 10_000 * (1 + AGE_JITTER / 2)
    assert all(abs(age - 10_000) <= 10_000 * AGE_JITTER for age in ages)
    assert LeanTransport([], "127.0.0.1", 0).max_age_ms() == 0


async def until(met: Callable[[], bool]) -> None:
    while not met():  # noqa: ASYNC110 - what it waits for has no event
        await asyncio.sleep(0.005)


@pytest.mark.more
async def test_a_real_client_loses_no_call_while_its_connections_come_and_go() -> None:
    """Calls all the time over connections that live for a moment; a long poll survives one."""

    async def test() -> None:
        held = Held()
        methods = [
            Method("/s/echo", MethodType.UNARY, start=echo),
            Method("/s/held", MethodType.UNARY, start=held.start),
        ]
        limits = replace(LeanSettings(), max_age_ms=1)
        transport = LeanTransport(methods, "127.0.0.1", 0, limits=limits)
        port = await transport.start()
        client: Any = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        async with client:
            poll = asyncio.ensure_future(client.unary_unary("/s/held")(b""))
            await until(lambda: len(held.calls) == 1)
            sent = 0
            while transport.counters.aged < 3:
                assert await client.unary_unary("/s/echo")(b"x") == b"x"
                sent += 1
            held.calls[0].send(b"polled")
            held.calls[0].finish()
            assert await poll == b"polled"
        await transport.stop(1)
        assert transport.counters.calls == sent + 1
        assert not transport.counters.cut_off

    async with asyncio.timeout(60):
        await test()
