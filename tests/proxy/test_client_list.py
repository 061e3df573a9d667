"""ListClients: what proxies say of clients reaches every broker, and comes back as one list."""

import socket
from collections.abc import Mapping
from typing import Any

import pytest
from proxy.houses import until_read

from popmq.common.errors import Code, NotMaster, Refused
from popmq.common.protocol.messaging_payloads import DESCRIPTION_BYTES, Kind, OnReply
from popmq.common.settings.settings import ProxySettings, Settings
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.messaging import client_directory
from popmq.proxy.proxy import Proxy
from popmq.proxy.rpc.convert import OK_ONLY
from popmq.testing.harness.clock import ManualClock
from popmq.testing.harness.core_broker import CoreBroker

BEAT = service.HeartbeatRequest(client_type=pb.ClientType.PUSH_CONSUMER)


class Counted:
    """The way to a real broker that counts the bytes of reports, and can be cut."""

    def __init__(self, core: CoreBroker) -> None:
        self.core = core
        self.away = False
        self.bytes = 0

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        if self.away:
            on_reply(NotMaster("it is away"))
            return 0
        self.bytes += len(body) if kind is Kind.CLIENTS else 0
        return self.core.server.request(kind, body, timeout_ms, on_reply)

    def cancel(self, request_id: int) -> None:
        self.core.server.cancel(request_id)


class Front:
    """A proxy over real brokers, and its clients."""

    def __init__(self, cores: Mapping[str, CoreBroker], make_call: Any, port: int = 8081) -> None:
        self.cores = cores
        self.ports = {name: Counted(core) for name, core in cores.items()}
        settings = Settings(proxy=ProxySettings(listen=f"127.0.0.1:{port}"))
        clock = next(iter(cores.values())).clock
        self.proxy = Proxy(settings, StaticBrokers(self.ports), clock)
        self.methods = {m.path.rpartition("/")[2]: m for m in self.proxy.methods()}
        self._make_call = make_call

    def call(self, method: str, request: Any, client_id: str, **metadata: str) -> Any:
        names = {name.replace("_", "-"): value for name, value in metadata.items()}
        call = self._make_call({"x-mq-client-id": client_id, **names})
        start = self.methods[method].start
        assert start is not None
        start(call, request.SerializeToString())
        for core in self.cores.values():
            core.run_until_idle()
        return call

    def settings(self, client_id: str, settings: pb.Settings, **metadata: str) -> Any:
        """The stream on which they were sent."""
        call = self._make_call({"x-mq-client-id": client_id, **metadata})
        open_ = self.methods["Telemetry"].open
        assert open_ is not None
        command = service.TelemetryCommand(settings=settings)
        stream = open_(call)
        stream.message(command.SerializeToString())
        return stream

    def listed(self, **asked: str) -> admin_pb2.ListClientsReply:
        call = self.call("ListClients", admin_pb2.ListClientsRequest(**asked), "")
        (sent,) = call.sent
        reply = admin_pb2.ListClientsReply.FromString(sent)
        assert reply.status.code == Code.OK, reply.status
        return reply

    def ids(self, **asked: str) -> list[str]:
        return [client.client_id for client in self.listed(**asked).clients]


def consumer(group: str, **topics: str) -> pb.Settings:
    entries = [
        pb.SubscriptionEntry(
            topic=pb.Resource(name=name), expression=pb.FilterExpression(expression=expression)
        )
        for name, expression in topics.items()
    ]
    return pb.Settings(
        client_type=pb.ClientType.PUSH_CONSUMER,
        user_agent=pb.UA(language=pb.Language.GOLANG, version="5.1"),
        subscription=pb.Subscription(group=pb.Resource(name=group), subscriptions=entries),
    )


def producer(*topics: str) -> pb.Settings:
    return pb.Settings(
        client_type=pb.ClientType.PRODUCER,
        publishing=pb.Publishing(topics=[pb.Resource(name=topic) for topic in topics]),
    )


@pytest.fixture
def front(make_call: Any) -> Front:
    return Front({"a": CoreBroker()}, make_call)


def test_a_client_is_listed_with_all_that_it_said(front: Front) -> None:
    front.call("Heartbeat", BEAT, "c@1", x_mq_language="GO", x_mq_client_version="5.0")
    front.settings("c@1", consumer("workers", orders="*", bills="eu || us"))
    front.proxy.clients.report()
    front.cores["a"].advance(700)
    reply = front.listed()
    (client,) = reply.clients
    assert (client.client_id, client.protocol, client.kind) == ("c@1", "grpc", "push consumer")
    assert (client.language, client.version) == ("GOLANG", "5.1")
    (group,) = client.groups
    subscribed = [(entry.topic, entry.filter) for entry in group.subscriptions]
    assert (group.name, subscribed) == ("workers", [("orders", ""), ("bills", "eu || us")])
    (connection,) = client.connections
    assert (connection.proxy, connection.address) == ("127.0.0.1:8081", "10.0.0.9:999")
    assert (reply.now_ms - connection.since_ms, connection.silent_ms) == (700, 700)


def test_a_client_of_a_namespace_is_listed_with_whole_names(front: Front) -> None:
    namespace = {"x-mq-namespace": "eu"}
    front.settings("c@1", consumer("workers", orders="*"), **namespace)
    beat = service.HeartbeatRequest(
        client_type=pb.ClientType.SIMPLE_CONSUMER, group=pb.Resource(name="others")
    )
    front.call("Heartbeat", beat, "c@2", **namespace)
    front.proxy.clients.report()
    assert front.ids(group="eu%workers", topic="eu%orders") == ["c@1"]
    assert front.ids(group="eu%others") == ["c@2"]
    assert front.ids(group="workers") == []


@pytest.mark.parametrize(
    ("listen", "worker", "name"),
    [
        ("127.0.0.1:8081", 0, "127.0.0.1:8081"),
        ("127.0.0.1:8081", 2, "127.0.0.1:8081/2"),
        ("0.0.0.0:8081", 0, f"{socket.gethostname()}:8081"),
    ],
)
def test_the_name_of_a_proxy_differs_from_those_of_others(
    listen: str, worker: int, name: str
) -> None:
    settings = Settings(proxy=ProxySettings(listen=listen))
    assert Proxy(settings, StaticBrokers({}), ManualClock(), worker=worker).name == name


def test_a_client_that_says_little_is_listed_by_its_calls_alone(front: Front) -> None:
    front.call("Heartbeat", BEAT, "c@1", x_mq_language="RUST", x_mq_client_version="1\x07")
    front.proxy.clients.report()
    (client,) = front.listed().clients
    assert (client.language, client.version, client.kind) == ("RUST", "", "push consumer")
    beat = service.HeartbeatRequest(
        client_type=pb.ClientType.SIMPLE_CONSUMER, group=pb.Resource(name="g")
    )
    front.call("QueryRoute", service.QueryRouteRequest(topic=pb.Resource(name="t")), "c@2")
    front.proxy.clients.report()
    assert front.listed().clients[1].kind == ""
    front.call("Heartbeat", beat, "c@2")
    front.proxy.clients.report()
    (client,) = front.listed(group="g").clients
    assert (client.client_id, client.kind) == ("c@2", "simple consumer")


def test_the_list_is_filtered_by_group_and_by_topic(front: Front) -> None:
    front.settings("c@1", consumer("workers", orders="*"))
    front.settings("c@2", consumer("others", bills="*"))
    front.settings("p@1", producer("orders", "letters"))
    front.proxy.clients.report()
    assert front.ids() == ["c@1", "c@2", "p@1"]
    assert front.ids(group="workers") == ["c@1"]
    assert front.ids(topic="orders") == ["c@1", "p@1"]
    assert front.ids(topic="letters") == ["p@1"]
    assert front.ids(group="others", topic="orders") == []


def test_clients_of_all_proxies_are_listed_by_each_and_one_at_two_proxies_once(
    make_call: Any,
) -> None:
    cores = {"a": CoreBroker(), "b": CoreBroker()}
    first, second = Front(cores, make_call, 8081), Front(cores, make_call, 8082)
    first.settings("c@1", consumer("workers", orders="*"))
    second.call("Heartbeat", BEAT, "c@1")
    second.call("Heartbeat", BEAT, "c@2")
    first.proxy.clients.report()
    for core in cores.values():
        core.advance(1_000)
    second.proxy.clients.report()
    for front in (first, second):
        both, only = front.listed().clients
        assert (both.client_id, only.client_id) == ("c@1", "c@2")
        assert [group.name for group in both.groups] == ["workers"]
        proxies = [(item.proxy, item.silent_ms) for item in both.connections]
        assert proxies == [("127.0.0.1:8082", 0), ("127.0.0.1:8081", 1_000)]


def test_a_client_that_changes_nothing_costs_its_id_alone(front: Front) -> None:
    def report_bytes() -> int:
        before = front.ports["a"].bytes
        front.call("Heartbeat", BEAT, "c@1")
        front.settings("c@1", consumer("workers", **{f"topic-{n}": "*" for n in range(50)}))
        front.proxy.clients.report()
        return front.ports["a"].bytes - before

    sizes = [report_bytes() for _ in range(4)]
    assert sizes[0] > 500
    assert sizes[1:] == [len("c@1") + len("127.0.0.1:8081") + 10] * 3
    front.settings("c@1", consumer("workers", other="*"))
    front.proxy.clients.report()
    assert front.ids(topic="other") == ["c@1"]
    assert front.ids(topic="topic-1") == []


def test_a_broker_that_began_again_asks_for_the_clients_and_has_them_at_the_next_report(
    front: Front,
) -> None:
    core = front.cores["a"]
    front.settings("c@1", consumer("workers", orders="*"))
    front.call("Heartbeat", BEAT, "c@1")
    front.proxy.clients.report()
    core.stop()
    core.start()
    assert front.ids() == []
    front.call("Heartbeat", BEAT, "c@1")
    front.proxy.clients.report()
    assert front.ids(group="workers") == ["c@1"]


def test_a_report_that_was_lost_is_made_up_for(make_call: Any) -> None:
    front = Front({"a": CoreBroker(), "b": CoreBroker()}, make_call)
    front.ports["a"].away = True
    front.call("Heartbeat", BEAT, "c@1")
    front.proxy.clients.report()
    front.ports["a"].away, front.ports["b"].away = False, True
    reply = front.listed()
    assert not reply.clients
    assert reply.incomplete == "broker b: it is away"
    front.call("Heartbeat", BEAT, "c@1")
    front.proxy.clients.report()
    assert front.ids() == ["c@1"]


def test_a_client_is_forgotten_when_it_says_good_bye_or_is_silent_for_a_minute(
    front: Front,
) -> None:
    core = front.cores["a"]
    for client_id in ("c@1", "c@2", "c@3"):
        front.call("Heartbeat", BEAT, client_id)
    front.proxy.clients.report()
    front.call("NotifyClientTermination", service.NotifyClientTerminationRequest(), "c@1")
    assert front.ids() == ["c@2", "c@3"]
    core.advance(50_000)
    front.call("Heartbeat", BEAT, "c@3")
    front.proxy.clients.report()
    core.advance(11_000)
    front.proxy.clients.report()
    assert front.ids() == ["c@3"]
    # It is new to the proxy too, which describes it once more.
    front.call("Heartbeat", BEAT, "c@2")
    front.proxy.clients.report()
    assert front.ids() == ["c@2", "c@3"]


def test_the_clients_of_a_proxy_that_stops_are_gone_from_it(make_call: Any) -> None:
    cores = {"a": CoreBroker()}
    first, second = Front(cores, make_call, 8081), Front(cores, make_call, 8082)
    for front, client_id in ((first, "c@1"), (first, "c@2"), (second, "c@2")):
        front.call("Heartbeat", BEAT, client_id)
        front.proxy.clients.report()
    first.proxy.clients.stop()
    (client,) = second.listed().clients
    assert client.client_id == "c@2"
    assert [item.proxy for item in client.connections] == ["127.0.0.1:8082"]


async def test_more_topics_than_a_description_holds_are_cut_and_the_client_is_marked(
    front: Front,
) -> None:
    names = {f"topic-{number:04}-{'x' * 80}": "*" for number in range(200)}
    await until_read(front.settings("c@1", consumer("workers", **names)))
    front.settings("p@1", producer(*names))
    front.proxy.clients.report()
    for client in front.listed().clients:
        assert client.shortened
        assert DESCRIPTION_BYTES - 1_500 < client.ByteSize() <= DESCRIPTION_BYTES


def test_clients_beyond_the_bound_are_served_and_not_described(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_directory, "CLIENTS_LIMIT", 2)
    for number in range(4):
        call = front.call("Heartbeat", BEAT, f"c@{number}")
        assert call.sent == [OK_ONLY]
    front.proxy.clients.report()
    before = front.ports["a"].bytes
    assert front.ids() == ["c@0", "c@1"]
    for number in range(4):
        front.call("Heartbeat", BEAT, f"c@{number}")
    front.proxy.clients.report()
    assert front.ports["a"].bytes - before < 100, "the brokers asked for what there is not"


def test_a_page_ends_where_that_of_one_broker_ends(two_brokers: Any) -> None:
    ok = admin_pb2.Status(code=Code.OK)
    pages = {"broker-a": ("a c e", ""), "broker-b": ("a b c d", "d")}
    for name, (ids, until) in pages.items():
        clients = [admin_pb2.ConnectedClient(client_id=client_id) for client_id in ids.split()]
        reply = admin_pb2.ListClientsReply(status=ok, clients=clients, until=until)
        answer = reply.SerializeToString()
        two_brokers.brokers[name].tells[Kind.LIST_CLIENTS] = lambda _, answer=answer: answer
    request = admin_pb2.ListClientsRequest()
    page = two_brokers.unary("ListClients", request, admin_pb2.ListClientsReply)
    assert [client.client_id for client in page.clients] == ["a", "b", "c", "d"]
    assert page.until == "d"


def test_many_new_clients_are_described_over_several_reports(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_directory, "REPORTED_BYTES", 1_000)
    for number in range(100):
        front.call("Heartbeat", BEAT, f"c@{number}")
    front.proxy.clients.report()
    core, first = front.cores["a"], len(front.ids())
    assert 10 < first < 60  # the broker asked for more at once
    core.stop()
    core.start()
    reports = 0
    while len(front.ids()) < 100:
        for number in range(100):
            front.call("Heartbeat", BEAT, f"c@{number}")
        front.proxy.clients.report()
        reports += 1
    assert 2 <= reports < 10


def test_a_broker_of_before_is_named_and_the_others_answer(make_bench: Any) -> None:
    bench = make_bench(("broker-a", "broker-b"))
    why = Refused(Code.UNSUPPORTED, "frame kind 21 is not known here")
    bench.brokers["broker-a"].tells[Kind.LIST_CLIENTS] = lambda _: why
    reply = admin_pb2.ListClientsReply(
        status=admin_pb2.Status(code=Code.OK),
        clients=[admin_pb2.ConnectedClient(client_id="c@1")],
    )
    bench.brokers["broker-b"].tells[Kind.LIST_CLIENTS] = lambda _: reply.SerializeToString()
    request = admin_pb2.ListClientsRequest()
    answer = bench.unary("ListClients", request, admin_pb2.ListClientsReply)
    assert answer.status.code == Code.OK
    assert [client.client_id for client in answer.clients] == ["c@1"]
    assert answer.incomplete == "broker broker-a: frame kind 21 is not known here"


def test_the_answer_of_a_broker_of_before_asks_for_nothing(make_bench: Any) -> None:
    bench = make_bench()
    bench.broker.tells[Kind.CLIENTS] = lambda _: b""
    bench.start("Heartbeat", BEAT)
    bench.proxy.clients.report()
    assert len(bench.broker.bodies(Kind.CLIENTS)) == 2  # the description, and who is alive
