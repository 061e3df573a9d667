"""What all clients share: one connection may not take all of it."""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from proxy.lean.peer import prefixed
from security.http2 import RawClient
from security.target import CLIENT, SERVICE, Target, attacking

from popmq.broker.filter.sql92 import SqlFilter
from popmq.cli.client import Client
from popmq.common.errors import Code
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.transport.lean import frames

OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
pytestmark = pytest.mark.more


def receive(group: str, *, topic: str = "others", wait_s: int = 0, sql: str = "") -> bytes:
    request = service.ReceiveMessageRequest(batch_size=1)
    request.group.name, request.message_queue.topic.name = group, topic
    request.long_polling_timeout.seconds = wait_s
    request.invisible_duration.seconds = 60
    if sql:
        request.filter_expression.type = pb.FilterType.SQL
        request.filter_expression.expression = sql
    return request.SerializeToString()


def code_of(channel: grpc.Channel, request: bytes) -> int:
    send: Any = channel.unary_stream(f"{SERVICE}ReceiveMessage")
    parts = send(request, metadata=CLIENT, timeout=60)
    replies: list[Any] = [service.ReceiveMessageResponse.FromString(part) for part in parts]
    return next(int(reply.status.code) for reply in replies if reply.HasField("status"))


def compiled(target: Target) -> int:
    return target.metric("popmq_sql_filters_compiled_total")


def test_one_connection_with_more_receives_than_may_wait(tmp_path: Path) -> None:
    """Others wait all the same, and the connection itself goes on."""
    settings = {"POPMQ_POLL_WAITERS": "1000"}
    with Target(tmp_path, settings=settings) as target, attacking(target):
        with Client(target.ready.endpoint) as tool:
            made = admin.CreateTopicRequest(topic=admin.Topic(name="quiet"))
            tool.call_admin(made, admin.TopicReply)
        greedy = prefixed(receive("greedy", topic="quiet", wait_s=30))
        with RawClient(target.address) as client:
            for _ in range(1_200):
                client.open(f"{SERVICE}ReceiveMessage", CLIENT)
                client.data(greedy, frames.END_STREAM)
            beat = service.HeartbeatRequest(client_type=pb.ClientType.SIMPLE_CONSUMER)
            last = client.open(f"{SERVICE}Heartbeat", CLIENT)
            client.data(prefixed(beat.SerializeToString()), frames.END_STREAM)
            client.until_ended(last)
            assert not client.closed
            with grpc.insecure_channel(target.ready.endpoint) as channel:
                request = receive("modest", topic="quiet", wait_s=1)
                assert code_of(channel, request) == Code.MESSAGE_NOT_FOUND.value


def test_new_sql_filters_of_sixteen_kibibytes_and_three_hundred_of_four(tmp_path: Path) -> None:
    with Target(tmp_path) as target, attacking(target) as attack:
        attack.until_sent()
        with grpc.insecure_channel(target.ready.endpoint) as channel:
            large = f"a = 1{' OR a = 1' * 1_700}"
            for number in range(20):
                assert len(large) > 15_000
                code = code_of(channel, receive("g", sql=f"{large} OR a = {number}"))
                assert code == Code.ILLEGAL_FILTER_EXPRESSION.value
            before, began_s = compiled(target), time.monotonic()
            text = f"a = 1{' OR a = 1' * 440}"
            codes = [
                code_of(channel, receive("g", sql=f"{text} OR a = {number}"))
                for number in range(300)
            ]
            allowed = 100 + 10 * (time.monotonic() - began_s)
        assert compiled(target) - before <= allowed + 1
        assert codes.count(Code.TOO_MANY_REQUESTS.value) > 0
        with grpc.insecure_channel(target.ready.endpoint, OWN_CONNECTION) as other:
            assert code_of(other, receive("g", sql="a = 2")) != Code.TOO_MANY_REQUESTS.value


def test_two_thousand_receives_with_new_group_names_and_ten_scrapes(tmp_path: Path) -> None:
    with Target(tmp_path) as target, attacking(target) as attack:
        attack.until_sent()
        with grpc.insecure_channel(target.ready.endpoint) as channel:
            codes = [code_of(channel, receive(f"a-new-group-{n:06}")) for n in range(2_000)]
        pages = [page for _ in range(10) for page in target.metrics()]
    assert codes.count(Code.TOO_MANY_REQUESTS.value) == 1_000
    groups = [page.count(b"\npopmq_consumer_lag_messages{") for page in pages]
    print(f"{max(map(len, pages))} bytes, {max(groups)} groups")
    assert max(map(len, pages)) <= 1 << 20
    assert max(groups) == 501


def calls_made(work: Callable[[], object]) -> int:
    """How many functions it calls, those in C among them."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_no_filter_of_four_kibibytes_makes_more_than_sixty_thousand_calls() -> None:
    """About 10 ms of CPU, which depends on the machine; the number of calls does not."""
    worst = [
        "a = 1" + " OR a = 1" * 454,
        " OR ".join(["a"] * 800),
        "NOT " * 1_020 + "a",
        f"a IN ({','.join(['1'] * 1_020)})",
        f"a LIKE '{'%a' * 2_000}'",
        "OR".join([f"{'(' * 60}a{')' * 60}"] * 16),
        "OR".join(["(a)=(b)"] * 220),
        " OR ".join(["a=1e9"] * 450),
        "AND".join(["(a)OR(b)"] * 220),
    ]
    for text in worst:
        calls = calls_made(partial(SqlFilter, text))
        print(f"{text[:20]}: {len(text)} bytes, {calls} calls")
        assert calls < 60_000
