"""A broker group is drained while kill -9 hits it and those that take its timers, and is removed:
each timer is delivered once, and none early; recall handles of the group that is gone are good."""

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from e2e.many import Many
from e2e.processes import tail
from google.protobuf.timestamp_pb2 import Timestamp

from popmq.cli.client import Client
from popmq.cli.drain import read_remainder
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.drain_remainder import DrainRemainder
from popmq.common.record.recall_handle import RecallHandle
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api
from popmq.proxy.api import service_pb2 as service

TIMERS = 450
RECALLED = 12
DUE_S = 75.0
WAIT_S = 60.0
# The source, who takes, the owner, the source again: when so many have moved.
KILLS = ((15, "broker-c-0"), (40, "broker-b-0"), (60, "broker-a-0"), (80, "broker-c-0"))


def until(what: str, look_once: Callable[[], object], many: Many, within_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            if look_once():
                return
        except PopmqError as error:  # somebody was killed just now
            what = f"{what} ({error})" if "(" not in what else what
        assert time.monotonic() < deadline_s, f"not {what}:\n{tail(many.log)}"
        time.sleep(0.05)


def send_all(client: Client, due_s: int) -> dict[str, str]:
    """Recall handles by message id."""
    handles = {}
    for number in range(TIMERS):
        properties = api.SystemProperties(
            message_id=f"t-{number}", body_encoding=api.IDENTITY, message_type=api.DELAY
        )
        properties.delivery_timestamp.CopyFrom(Timestamp(seconds=due_s))
        message = api.Message(
            topic=api.Resource(name="later"), body=b"x", system_properties=properties
        )
        handles[f"t-{number}"] = client.send(message).recall_handle
    return handles


def recall(endpoint: str, handle: str) -> service.RecallMessageResponse:
    with grpc.insecure_channel(endpoint) as channel:
        call = channel.unary_unary(
            "/apache.rocketmq.v2.MessagingService/RecallMessage",
            request_serializer=service.RecallMessageRequest.SerializeToString,
            response_deserializer=service.RecallMessageResponse.FromString,
        )
        request = service.RecallMessageRequest(
            topic=api.Resource(name="later"), recall_handle=handle
        )
        reply = call(request, timeout=20, metadata=(("x-mq-client-id", "a-test"),))
        assert isinstance(reply, service.RecallMessageResponse)
        return reply


def kill_while_it_moves(client: Client, many: Many) -> None:
    for moved, name in KILLS:

        def has_moved(count: int = moved) -> bool:
            return (
                client.call_admin(
                    admin.DrainRequest(group="broker-c", look=True), admin.DrainReply
                ).moved
                >= count
            )

        until(f"{moved} moved", has_moved, many)
        before = many.process(name)
        os.kill(before["pid"], signal.SIGKILL)

        def is_back(text: str = name, starts: int = before["starts"]) -> bool:
            return bool(many.process(text)["starts"] > starts)

        until(f"{name} back", is_back, many)


def receive_all(client: Client, count: int, until_s: float) -> Counter[str]:
    counters: Counter[str] = Counter()
    while sum(counters.values()) < count and time.time() < until_s:
        got = client.receive(
            "g",
            api.MessageQueue(topic=api.Resource(name="later")),
            limit=32,
            wait_ms=500,
            invisible_ms=60_000,
        )
        counters.update(message.system_properties.message_id for message in got)
        if got:
            client.ack("g", "later", got)
    return counters


def _remove(data: Path, group: str) -> None:
    """With all that it ever stored; `popmq up` refuses to forget a group by itself."""
    (data / "cluster.json").unlink()
    folders = list(data.glob(f"{group}-*/"))
    assert folders
    for folder in folders:
        shutil.rmtree(folder)


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_group_is_drained_and_removed_before_its_timers_are_due_whoever_is_killed(
    tmp_path: Path,
) -> None:
    settings = {"POPMQ_TIMER_MOVES_PER_SECOND": "20"}
    with (
        Many(tmp_path, "--groups", "3", settings=settings) as many,
        Client(many.ready.endpoint) as client,
    ):
        topic = admin.Topic(name="later", type="delay", queues=4)
        client.topic(admin.CreateTopicRequest(topic=topic))
        client.group(admin.CreateGroupRequest(group=admin.Group(name="g")))
        due_s = int(time.time() + DUE_S)
        handles = send_all(client, due_s)
        of_c = [
            handle for handle, at in handles.items() if RecallHandle.decode(at).broker == "broker-c"
        ]
        assert len(of_c) > 100
        client.call_admin(admin.DrainRequest(group="broker-c"), admin.DrainReply)
        kill_while_it_moves(client, many)
        first = recall(many.ready.endpoint, handles[of_c[0]])
        assert Code(first.status.code) is Code.OK, first
        rests: list[DrainRemainder] = []

        def is_drained() -> bool:
            rests.append(read_remainder(client, "broker-c"))
            return rests[-1].is_drained

        until("drained", is_drained, many)
        # One was recalled, perhaps before it moved.
        assert len(of_c) - 1 <= rests[-1].moved <= len(of_c)
        left_s = due_s - time.time()
        print(f"\n{len(of_c)} timers moved, {len(KILLS)} kills, {left_s:.0f} s before they are due")
        assert left_s > 15
    _remove(many.data, "broker-c")
    with Many(tmp_path, "--groups", "2") as many, Client(many.ready.endpoint) as client:
        for item in of_c[:RECALLED]:
            reply = recall(many.ready.endpoint, handles[item])
            assert (Code(reply.status.code), reply.message_id) == (Code.OK, item)
        assert time.time() < due_s
        assert receive_all(client, 1, due_s - 0.5) == Counter()
        expected = handles.keys() - set(of_c[:RECALLED])
        result = receive_all(client, len(expected), due_s + WAIT_S)
        result += receive_all(client, 1, time.time() + 3)
        assert result == Counter(expected)
        assert time.time() >= due_s
