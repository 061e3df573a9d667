"""FIFO order across full restarts in which one of two broker groups comes back later."""

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from e2e.processes import Cluster
from e2e.test_two_groups import create, until

from popmq.cli.client import Client
from popmq.common.errors import Code
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api
from popmq.proxy.api import service_pb2 as service

SEED = 20_261_123
KEYS = [f"key-{number}" for number in range(12)]
SENDS = 3  # per key and round; the first before the second broker group starts
SEND_S = 1.0  # deadline of one attempt
ATTEMPTS = 30
BOTH = ["broker-a", "broker-b"]
IN_CI = [pytest.mark.more, pytest.mark.timeout(180)]
BY_HAND = [pytest.mark.long, pytest.mark.timeout(3_600)]
RETRIED = (Code.HA_NOT_AVAILABLE, Code.PROXY_TIMEOUT)  # answers after which a sender tries again


class Sender:
    """Sends the numbers 0, 1, 2, ... of each key, each one after the one before it is stored."""

    def __init__(self) -> None:
        self.stored = dict.fromkeys(KEYS, 0)  # by key, how many

    def try_next(self, channel: grpc.Channel, key: str) -> int:
        """One attempt to send the key's next number. Returns the code of the reply."""
        number = self.stored[key]
        message = api.Message(
            topic=api.Resource(name="orders"),
            body=str(number).encode(),
            system_properties=api.SystemProperties(
                message_id=f"{key}-{number}",
                message_type=api.FIFO,
                message_group=key,
                body_encoding=api.IDENTITY,
            ),
        )
        send = channel.unary_unary(
            "/apache.rocketmq.v2.MessagingService/SendMessage",
            request_serializer=service.SendMessageRequest.SerializeToString,
            response_deserializer=service.SendMessageResponse.FromString,
        )
        request = service.SendMessageRequest(messages=[message])
        try:
            reply = send(request, timeout=SEND_S, metadata=(("x-mq-client-id", "sender"),))
        except grpc.RpcError as error:  # a busy machine; the message may be stored
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            return Code.PROXY_TIMEOUT
        code = int(reply.status.code)
        self.stored[key] += code == Code.OK
        return code

    def send_next(self, channel: grpc.Channel, key: str) -> None:
        """Try again as clients do, until the key's next number is stored."""
        code = 0
        for _ in range(ATTEMPTS):
            code = self.try_next(channel, key)
            if code == Code.OK:
                return
            assert code in RETRIED, f"{key}: a client does not retry a send after {code}"
        raise AssertionError(f"{key}: {ATTEMPTS} attempts failed, the last one with {code}")


def receive_all(client: Client, count: int) -> dict[str, list[int]]:
    """So many messages, each acknowledged: the numbers of each key, as they were delivered."""
    received: dict[str, list[int]] = defaultdict(list)

    def one_more_batch() -> bool:
        queue = api.MessageQueue(topic=api.Resource(name="orders"))
        messages = client.receive("in-order", queue, limit=32, wait_ms=500, invisible_ms=60_000)
        for message in messages:
            received[message.system_properties.message_group].append(int(message.body))
        if messages:
            client.ack("in-order", "orders", messages)
        return sum(map(len, received.values())) >= count

    until(f"{count} messages received", one_more_batch)
    return received


def start_with_one_group_absent(cluster: Cluster, absent: int, sender: Sender) -> Sequence[str]:
    """Send one message of each key, then start the other group and send the rest.

    Returns the keys whose first attempt was refused while the group was absent.
    """
    cluster.controller.start()
    cluster.brokers[1 - absent].start()
    (proxy,) = cluster.proxies
    proxy.start()
    target = min(sender.stored.values()) + SENDS
    with grpc.insecure_channel(proxy.ready.endpoint) as channel:
        codes = {key: sender.try_next(channel, key) for key in KEYS}
        assert set(codes.values()) <= {Code.OK, *RETRIED}, codes
        cluster.brokers[absent].start()
        with Client(proxy.ready.endpoint) as client:
            until("both groups known to the proxy", lambda: routed_groups(client) == BOTH)
        for key in KEYS:
            while sender.stored[key] < target:
                sender.send_next(channel, key)
    return [key for key in KEYS if codes[key] != Code.OK]


def has_both_groups(client: Client) -> bool:
    reply = client.call_admin(admin.ListBrokersRequest(group=""), admin.ListBrokersReply).found
    return len(reply.groups) == 2 and bool(reply.owner)


def routed_groups(client: Client) -> list[str]:
    return sorted({queue.broker.name for queue in client.query_route("orders")})


@pytest.mark.parametrize("rounds", [pytest.param(2, marks=IN_CI), pytest.param(50, marks=BY_HAND)])
def test_each_key_stays_in_order_when_one_of_two_broker_groups_starts_later(
    tmp_path: Path, rounds: int
) -> None:
    rng = random.Random(SEED)
    sender = Sender()
    with Cluster(tmp_path, groups=2) as cluster:
        with Client(cluster.endpoints[0]) as client:
            until("two broker groups and an owner", lambda: has_both_groups(client))
            create(client, "orders", "fifo")
            group = admin.Group(name="in-order", type="fifo")
            client.group(admin.CreateGroupRequest(group=group))
            until("both groups known to the proxy", lambda: routed_groups(client) == BOTH)
            with grpc.insecure_channel(cluster.endpoints[0]) as channel:
                for key in KEYS:
                    sender.send_next(channel, key)  # both groups know the topic now
            assert receive_all(client, len(KEYS)) == {key: [0] for key in KEYS}
        first = 1
        for number in range(rounds):
            for role in (*cluster.proxies, *cluster.brokers, cluster.controller):
                rng.choice((role.terminate, role.kill9))()
            refused = start_with_one_group_absent(cluster, (number + 1) % 2, sender)
            with Client(cluster.endpoints[0]) as client:
                received = receive_all(client, len(KEYS) * SENDS)
            in_order = list(range(first, first + SENDS))
            wrong = {key: numbers for key, numbers in received.items() if numbers != in_order}
            print(f"round {number}: {len(refused)} keys waited, {len(wrong)} out of order")
            assert not wrong, f"seed {SEED}, round {number}: expected {in_order}: {wrong}"
            assert refused, "some keys belong to the group that was absent"
            first += SENDS
