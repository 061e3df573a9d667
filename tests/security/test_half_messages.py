"""Checks of half messages show their bodies, so they go to users that may publish to the topic.

A client names its id and its producer group freely: neither gives a right.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from console.console_site import until
from security.callers import Caller, M, Row, entry, message
from security.test_remoting_users import Caller as RemotingCaller
from security.test_remoting_users import Peer
from security.test_remoting_users import Row as RemotingRow

from popmq.cli.client import Client
from popmq.common.signing import Signer
from popmq.common.wire import admin_pb2 as own
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.testing.running_broker import RunningBroker

SECRET = "secret-of-a-test-0123456789"
HEART_BEAT, SEND_V2, CHECK = 34, 310, 39


@pytest.fixture(params=["lean", "grpcio"])
def broker(request: pytest.FixtureRequest) -> Iterator[RunningBroker]:
    settings = {
        "proxy.transport": request.param,
        "transaction.first_check_ms": 1_000,
        "transaction.check_interval_ms": 1_000,
        "transaction.max_checks": 1_000,
        "auth.skew_ms": 600_000,  # clients sign by the machine's clock, and the broker's skips
    }
    with RunningBroker(settings=settings, users=True) as running:
        with administration(running) as client:
            for name in ("payments", "other"):
                topic = own.Topic(name=name, queues=1, type="transaction")
                client.topic(own.CreateTopicRequest(topic=topic))
            for user, topics in (("payer", ("payments",)), ("thief", ("other",))):
                entries = [entry(f"topic:{topic}", "pub", "sub") for topic in topics]
                request_ = own.CreateUserRequest(name=user, secret=SECRET, entries=entries)
                client.call_admin(request_, own.UserReply)
        yield running


def administration(broker: RunningBroker) -> Client:
    return Client(broker.endpoint, signer=Signer(broker.access_key, broker.secret))


def deny(broker: RunningBroker, user: str, resource: str) -> None:
    with administration(broker) as client:
        entries = [entry(resource, "pub", deny=True)]
        client.call_admin(own.GrantRequest(name=user, entries=entries), own.UserReply)


class Stream:
    """A telemetry stream of a producer of `topic`, under a client id that it chooses."""

    def __init__(self, broker: RunningBroker, user: str, topic: str) -> None:
        self._channel: Any = grpc.insecure_channel(
            broker.endpoint, [("grpc.use_local_subchannel_pool", 1)]
        )
        self._commands: SimpleQueue[bytes | None] = SimpleQueue()
        self.checks: list[bytes] = []
        self.is_open = False
        settings = pb.Settings(client_type=pb.ClientType.PRODUCER)
        settings.publishing.topics.add(name=topic)
        self._commands.put(service.TelemetryCommand(settings=settings).SerializeToString())
        call: Any = self._channel.stream_stream(f"{M}Telemetry")
        self._answers = call(iter(self._commands.get, None), metadata=headers(user))
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(self._read)
        until(lambda: self.is_open, bool)

    def _read(self) -> None:
        try:
            for data in self._answers:
                command = service.TelemetryCommand.FromString(data)
                self.is_open |= command.HasField("settings")
                if command.HasField("recover_orphaned_transaction_command"):
                    orphan = command.recover_orphaned_transaction_command
                    self.checks.append(orphan.message.body)
        except grpc.RpcError:
            return

    def close(self) -> None:
        self._commands.put(None)
        self._channel.close()
        self._thread.shutdown()


def headers(user: str) -> list[tuple[str, str]]:
    own_id = [field for field in Caller(user, SECRET).headers() if field[0] != "x-mq-client-id"]
    return [*own_id, ("x-mq-client-id", "payer@1")]


def send_half(broker: RunningBroker, body: bytes) -> None:
    half = message("payments")
    half.body = body
    half.system_properties.message_type = pb.TRANSACTION
    half.system_properties.orphaned_transaction_recovery_duration.FromTimedelta(
        timedelta(seconds=1)
    )
    row = Row(f"{M}SendMessage", service.SendMessageRequest(messages=[half]), pb.Status)
    channel: Any = grpc.insecure_channel(broker.endpoint)
    with channel:
        data = channel.unary_unary(row.path)(
            row.request.SerializeToString(), metadata=headers("payer")
        )
    reply = service.SendMessageResponse.FromString(data)
    assert reply.status.code == pb.OK, reply


def checked(broker: RunningBroker, look: Callable[[], bool]) -> None:
    """Time passes until a check has arrived."""

    def step() -> bool:
        broker.advance("1s")
        return look()

    until(step, bool)


def test_a_stream_of_another_user_under_the_senders_client_id_gets_no_check(
    broker: RunningBroker,
) -> None:
    send_half(broker, b"pay 100")
    thief = Stream(broker, "thief", "other")
    payer = Stream(broker, "payer", "payments")
    newer_thief = Stream(broker, "thief", "other")
    checked(broker, lambda: b"pay 100" in payer.checks)
    assert thief.checks == newer_thief.checks == []
    for stream in (thief, payer, newer_thief):
        stream.close()


def test_a_sender_that_lost_the_right_to_publish_gets_no_more_checks(
    broker: RunningBroker,
) -> None:
    with administration(broker) as client:
        rights = [entry("topic:payments", "pub", "sub")]
        request = own.CreateUserRequest(name="former", secret=SECRET, entries=rights)
        client.call_admin(request, own.UserReply)
    send_half(broker, b"pay 200")
    payer = Stream(broker, "payer", "payments")
    former = Stream(broker, "former", "payments")  # the newest stream is asked
    checked(broker, lambda: bool(former.checks))
    deny(broker, "former", "topic:payments")
    # What the proxy handed over before the denial may be on its way still.
    metrics = broker._running().proxy._proxy.metrics
    until(lambda: len(former.checks) + len(payer.checks) == metrics.transaction_checks, bool)
    before = len(former.checks)
    checked(broker, lambda: bool(payer.checks))
    assert len(former.checks) == before
    former.close()
    payer.close()


class Producer(Peer):
    """A Remoting client that says it is of the group `payers`."""

    def __init__(self, broker: RunningBroker, user: str) -> None:
        super().__init__(broker.endpoint)
        self.caller = RemotingCaller(user, SECRET)
        named = {"clientID": f"{user}@1", "producerDataSet": [{"groupName": "payers"}]}
        answer = self.ask(RemotingRow("heartbeat", HEART_BEAT, [], {}, named), self.caller)
        assert answer.code == 0, answer.remark

    def send_half(self) -> None:
        properties = (
            "UNIQ_KEY\x01id\x02TRAN_MSG\x01true\x02PGROUP\x01payers\x02"
            "CHECK_IMMUNITY_TIME_IN_SECONDS\x011\x02"
        )
        fields = {"a": "payers", "b": "payments", "e": "0", "f": "4", "i": properties}
        answer = self.ask(RemotingRow("half", SEND_V2, [], fields, {"pay": 300}), self.caller)
        assert answer.code == 0, answer.remark

    def checks(self) -> int:
        """How many have come; asks something, since answers come behind them."""
        self.ask(RemotingRow("good-bye", 35, [], {"clientID": "x"}), self.caller)
        return self.pushed.count(CHECK)


@pytest.mark.parametrize("broker", ["lean"], indirect=True)  # the other has no Remoting
def test_a_remoting_producer_of_another_user_in_the_same_group_gets_no_check(
    broker: RunningBroker,
) -> None:
    thief, payer = Producer(broker, "thief"), Producer(broker, "payer")
    payer.send_half()
    checked(broker, lambda: payer.checks() >= 2)
    assert thief.checks() == 0
    thief.close()
    payer.close()
