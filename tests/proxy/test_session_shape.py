"""Telemetry, routes, assignments, heartbeats and the admin service, as clients need them."""

import asyncio
import time
from typing import Any

import grpc.aio
import pytest
from proxy.houses import until_read
from proxy.rights import EveryRight

from popmq.common.back_off import ExponentialBackOff
from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import ProxySettings, Settings, TopicSettings
from popmq.common.topics import SubscriptionGroup
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.messaging import publishers
from popmq.proxy.messaging.client_settings import consumer_settings
from popmq.proxy.rpc import stream_limits
from popmq.proxy.transport.grpcio_server import GrpcioTransport
from popmq.proxy.transport.interface import GrpcStatus

SCHEMES = pb.AddressScheme
NODE = pb.UA(language=pb.Language.NODE_JS)
PYTHON = pb.UA(language=pb.Language.PYTHON)


def open_stream(bench: Any, make_call: Any, **call: Any) -> tuple[Any, Any]:
    recorded = make_call(**call)
    inbound = bench.methods["Telemetry"].open(recorded)
    return recorded, inbound


def told(settings: pb.Settings) -> bytes:
    return service.TelemetryCommand(settings=settings).SerializeToString()


def producer(agent: pb.UA = PYTHON) -> pb.Settings:
    return pb.Settings(
        client_type=pb.ClientType.PRODUCER,
        access_point=pb.Endpoints(scheme=SCHEMES.IPv4),
        user_agent=agent,
        publishing=pb.Publishing(topics=[pb.Resource(name="orders")]),
    )


def consumer(group: str = "workers", agent: pb.UA = PYTHON) -> pb.Settings:
    return pb.Settings(
        client_type=pb.ClientType.SIMPLE_CONSUMER,
        user_agent=agent,
        subscription=pb.Subscription(
            group=pb.Resource(name=group),
            fifo=True,
            subscriptions=[pb.SubscriptionEntry(topic=pb.Resource(name="orders"))],
        ),
    )


def answer(call: Any) -> Any:
    """The one command that was sent, whose status is OK."""
    (sent,) = call.sent
    command: Any = service.TelemetryCommand.FromString(sent)
    assert command.status.code == Code.OK
    return command.settings


def test_a_producer_gets_its_settings_at_once_with_what_it_sent(bench: Any, make_call: Any) -> None:
    call, inbound = open_stream(bench, make_call)
    inbound.message(told(producer()))
    settings = answer(call)
    backoff = settings.backoff_policy
    assert backoff.max_attempts == 3
    assert backoff.exponential_backoff.initial.ToMilliseconds() == 10
    assert backoff.exponential_backoff.max.ToMilliseconds() == 1_000
    assert backoff.exponential_backoff.multiplier == 2
    assert settings.publishing.max_body_size == 4 << 20
    assert settings.publishing.validate_message_type
    assert settings.publishing.topics[0].name == "orders"
    assert settings.client_properties == {"timer.max_delay_ms": str(366 * 86_400_000)}
    assert settings.access_point.scheme == SCHEMES.IPv4
    assert settings.HasField("metric")
    assert not settings.metric.on


def test_a_consumer_gets_the_groups_type_and_back_off(bench: Any, make_call: Any) -> None:
    bench.group("workers", "fifo", attempts=4)
    call, inbound = open_stream(bench, make_call)
    inbound.message(told(consumer()))
    settings = answer(call)
    assert settings.backoff_policy.max_attempts == 4
    steps = [item.seconds for item in settings.backoff_policy.customized_backoff.next]
    assert steps[:5] == [1, 5, 10, 30, 60]
    assert steps[-1] == 7200
    subscription = settings.subscription
    assert subscription.fifo
    assert subscription.receive_batch_size == 32
    assert subscription.long_polling_timeout.seconds == 20
    assert (subscription.lite_subscription_quota, subscription.max_lite_topic_size) == (2000, 64)
    assert subscription.subscriptions[0].topic.name == "orders"


@pytest.mark.parametrize(
    ("language", "form"),
    [
        (pb.Language.PYTHON, "customized_backoff"),
        (pb.Language.NODE_JS, "exponential_backoff"),
        (pb.Language.JAVA, "exponential_backoff"),
    ],
)
def test_an_exponential_back_off_is_told_in_the_form_that_a_client_reads(
    language: pb.Language.ValueType, form: str
) -> None:
    back_off = ExponentialBackOff(1_500, 10_000, 3_000, 50)
    group = SubscriptionGroup(9, "workers", max_attempts=5, exponential=back_off)
    asked = consumer(agent=pb.UA(language=language))
    policy = consumer_settings(asked, group, Settings()).backoff_policy
    assert policy.WhichOneof("strategy") == form
    assert policy.max_attempts == 5
    if form == "customized_backoff":
        # 1.5 s, 4.5 s and 10 s in the whole seconds that this client counts in.
        assert [item.seconds for item in policy.customized_backoff.next] == [2, 5, 10]
    else:
        told_ = policy.exponential_backoff
        assert (told_.initial.ToMilliseconds(), told_.max.ToMilliseconds()) == (1_500, 10_000)
        assert told_.multiplier == 3


@pytest.mark.parametrize("group", ["nobody", "", "bad.name"])
def test_a_consumer_of_an_unknown_group_gets_the_defaults(
    bench: Any, make_call: Any, group: str
) -> None:
    call, inbound = open_stream(bench, make_call)
    inbound.message(told(consumer(group)))
    settings = answer(call)
    assert settings.backoff_policy.max_attempts == 17
    assert not settings.subscription.fifo


def test_a_consumer_of_a_fifo_topic_in_an_unknown_group_gets_what_the_group_will_be(
    bench: Any, make_call: Any
) -> None:
    bench.topic("orders", "fifo")
    route(bench, "orders")  # as clients ask first
    call, inbound = open_stream(bench, make_call)
    inbound.message(told(consumer("nobody")))
    assert answer(call).subscription.fifo


def test_settings_without_a_purpose_end_the_stream_like_rocketmq(
    bench: Any, make_call: Any
) -> None:
    call, inbound = open_stream(bench, make_call)
    inbound.message(told(pb.Settings(client_type=pb.ClientType.PRODUCER)))
    assert call.status is GrpcStatus.INVALID_ARGUMENT
    assert call.detail == "there is no publishing or subscription data in settings"
    assert bench.proxy.metrics.open_streams == 0


def test_other_commands_are_taken_and_passed_over(bench: Any, make_call: Any) -> None:
    call, inbound = open_stream(bench, make_call)
    trace = service.ThreadStackTrace(nonce="1")
    inbound.message(service.TelemetryCommand(thread_stack_trace=trace).SerializeToString())
    inbound.message(b"")
    assert call.sent == []
    assert call.status is None


def test_a_stream_is_known_by_its_client_from_open_to_end(bench: Any, make_call: Any) -> None:
    first, item = open_stream(bench, make_call)
    second, _ = open_stream(bench, make_call)
    assert len(bench.proxy.telemetry.streams_of("me@1")) == 2
    assert bench.proxy.metrics.open_streams == 2
    item.half_closed()
    assert first.status is GrpcStatus.OK
    second.leave()
    assert bench.proxy.telemetry.streams_of("me@1") == ()
    assert bench.proxy.metrics.open_streams == 0


def test_a_stream_without_a_client_id_is_told_so_and_ends_well(bench: Any, make_call: Any) -> None:
    call, inbound = open_stream(bench, make_call, metadata={})
    (sent,) = call.sent
    command: Any = service.TelemetryCommand.FromString(sent)
    assert command.status.code == Code.CLIENT_ID_REQUIRED
    assert call.status is GrpcStatus.OK
    inbound.message(told(producer()))
    inbound.half_closed()


def test_a_proxy_that_stops_ends_its_streams_with_ok(bench: Any, make_call: Any) -> None:
    call, _ = open_stream(bench, make_call)
    bench.proxy.drain()
    assert call.status is GrpcStatus.OK


async def test_the_node_client_hears_its_settings_until_its_routes_must_be_there(
    make_bench: Any,
) -> None:
    async def asks_and_ends(channel: grpc.aio.Channel) -> None:
        stream: Any = channel.stream_stream("/apache.rocketmq.v2.MessagingService/Telemetry")
        call = stream(metadata=(("x-mq-client-id", "node@1"),))
        sent_s = time.monotonic()  # before the first answer, which starts the pauses
        await call.write(told(consumer(agent=NODE)))
        first = await call.read()
        assert await call.read() == first
        assert await call.read() == first
        assert time.monotonic() - sent_s >= 0.5 + 1.0
        command = service.TelemetryCommand.FromString(first)
        policy = command.settings.backoff_policy.exponential_backoff
        assert (policy.initial.seconds, policy.max.seconds, policy.multiplier) == (1, 7200, 2)
        await call.write(told(producer(NODE)))
        await call.read()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK

    bench = make_bench()
    bench.group("workers")
    transport = GrpcioTransport(bench.proxy.methods(), "127.0.0.1", 0)
    port = await transport.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await asks_and_ends(channel)
        assert bench.proxy.metrics.open_streams == 0
    finally:  # a server that is left fails whichever test its collection falls in
        await transport.stop(0)


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5, 6])
def test_a_heartbeat_needs_no_settings(bench: Any, kind: int) -> None:
    request = service.HeartbeatRequest(client_type=pb.ClientType.ValueType(kind))
    reply = bench.unary("Heartbeat", request, service.HeartbeatResponse)
    assert reply.status.code == Code.OK


@pytest.mark.parametrize("kind", [0, 99])
def test_a_heartbeat_of_nobody_is_refused(bench: Any, kind: int) -> None:
    request = service.HeartbeatRequest(client_type=pb.ClientType.ValueType(kind))
    reply = bench.unary("Heartbeat", request, service.HeartbeatResponse)
    assert reply.status.code == Code.UNRECOGNIZED_CLIENT_TYPE


def test_a_client_may_say_good_bye(bench: Any) -> None:
    request = service.NotifyClientTerminationRequest()
    reply = bench.unary("NotifyClientTermination", request, service.NotifyClientTerminationResponse)
    assert reply.status.code == Code.OK


def endpoints(host: str, port: int = 8081, scheme: Any = SCHEMES.IPv4) -> pb.Endpoints:
    return pb.Endpoints(scheme=scheme, addresses=[pb.Address(host=host, port=port)])


def route(bench: Any, topic: str, asked: pb.Endpoints | None = None, **call: Any) -> Any:
    request = service.QueryRouteRequest(topic=pb.Resource(name=topic), endpoints=asked)
    return bench.unary("QueryRoute", request, service.QueryRouteResponse, **call)


def test_a_route_lists_every_queue_of_every_broker_from_zero(two_brokers: Any) -> None:
    two_brokers.topic("orders", "mixed")
    reply = route(two_brokers, "orders", endpoints("10.1.1.1"))
    assert reply.status.code == Code.OK
    places = [(queue.broker.name, queue.id, queue.broker.id) for queue in reply.message_queues]
    names = ("broker-a", "broker-b")
    assert places == [(name, queue, 0) for name in names for queue in range(4)]
    queue = reply.message_queues[0]
    assert queue.permission == pb.Permission.READ_WRITE
    assert list(queue.accept_message_types) == [1, 2, 3, 4]
    assert queue.topic.name == "orders"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (endpoints("10.1.1.1"), endpoints("10.1.1.1")),
        (endpoints("localhost"), endpoints("localhost", scheme=SCHEMES.DOMAIN_NAME)),
        (endpoints("::1", scheme=SCHEMES.DOMAIN_NAME), endpoints("::1", scheme=SCHEMES.IPv6)),
        (
            pb.Endpoints(
                scheme=SCHEMES.DOMAIN_NAME,
                addresses=[pb.Address(host="a", port=1), pb.Address(host="b", port=2)],
            ),
            endpoints("a", 1, SCHEMES.DOMAIN_NAME),
        ),
        (None, endpoints("127.0.0.1", 4321)),
    ],
)
def test_a_route_names_endpoints_that_every_client_can_dial(
    bench: Any, asked: pb.Endpoints | None, expected: pb.Endpoints
) -> None:
    bench.proxy.listening_on("0.0.0.0", 4321)
    reply = route(bench, "orders", asked)
    assert reply.message_queues[0].broker.endpoints == expected


def test_an_advertised_address_wins_over_what_the_client_dialled(make_bench: Any) -> None:
    settings = Settings(proxy=ProxySettings(advertise="mq.example.org:443"))
    reply = route(make_bench(settings=settings), "orders", endpoints("10.1.1.1"))
    expected = endpoints("mq.example.org", 443, SCHEMES.DOMAIN_NAME)
    assert reply.message_queues[0].broker.endpoints == expected


@pytest.mark.parametrize(
    ("topic", "code"), [("nowhere", Code.TOPIC_NOT_FOUND), ("a b", Code.ILLEGAL_TOPIC)]
)
def test_a_route_to_nowhere_is_refused(bench: Any, topic: str, code: Code) -> None:
    assert route(bench, topic).status.code == code


def test_a_route_of_a_topic_that_its_first_send_makes_is_what_it_would_be(make_bench: Any) -> None:
    topic = TopicSettings(auto_create=True, auto_create_type="mixed", queues=3)
    bench = make_bench(settings=Settings(topic=topic))
    reply = route(bench, "nowhere")
    assert reply.status.code == Code.OK
    assert [queue.id for queue in reply.message_queues] == [0, 1, 2]
    assert pb.FIFO in reply.message_queues[0].accept_message_types
    asked = map(admin_pb2.DescribeTopicRequest.FromString, bench.broker.bodies(Kind.DESCRIBE_TOPIC))
    assert not any(request.auto_create for request in asked)
    assert assignment(bench, "workers", "nowhere").status.code == Code.OK


def test_the_next_broker_is_asked_when_the_first_is_away(two_brokers: Any) -> None:
    two_brokers.brokers["broker-a"].away = True
    assert route(two_brokers, "orders").status.code == Code.OK


def assignment(bench: Any, group: str, topic: str = "orders") -> Any:
    request = service.QueryAssignmentRequest(
        topic=pb.Resource(name=topic),
        group=pb.Resource(name=group),
        endpoints=endpoints("10.1.1.1"),
    )
    return bench.unary("QueryAssignment", request, service.QueryAssignmentResponse)


def test_a_normal_or_unknown_group_is_assigned_one_entry_a_broker(two_brokers: Any) -> None:
    two_brokers.group("workers")
    for group in ("workers", "nobody"):
        reply = assignment(two_brokers, group)
        queues = [item.message_queue for item in reply.assignments]
        assert [(queue.broker.name, queue.id) for queue in queues] == [
            ("broker-a", -1),
            ("broker-b", -1),
        ]
        assert list(queues[0].accept_message_types) == []


def test_a_fifo_group_is_assigned_every_queue(bench: Any) -> None:
    bench.group("workers", "fifo")
    reply = assignment(bench, "workers")
    assert [item.message_queue.id for item in reply.assignments] == [0, 1, 2, 3]


def test_a_topic_that_cannot_be_read_is_not_assigned(bench: Any) -> None:
    bench.topic("hole", permission="w")
    assert assignment(bench, "workers", "hole").status.code == Code.FORBIDDEN


def test_all_seventeen_methods_answer_and_none_is_left_open(bench: Any) -> None:
    names = set(service.DESCRIPTOR.services_by_name["MessagingService"].methods_by_name)
    assert len(names) == 17
    assert names <= set(bench.methods)
    for name in sorted(names - {"Telemetry"}):
        call = bench.start(name, service.HeartbeatRequest(), metadata={})
        first: Any = service.HeartbeatResponse.FromString(call.sent[0])
        assert (name, first.status.code) == (name, Code.CLIENT_ID_REQUIRED)
        assert call.status is GrpcStatus.OK


def test_an_admin_needs_no_client_id_and_is_answered_with_ok(bench: Any) -> None:
    request = admin_pb2.DescribeTopicRequest(name="orders")
    reply = bench.unary("DescribeTopic", request, admin_pb2.TopicReply, metadata={})
    assert (reply.status.code, reply.topic.queues) == (Code.OK, 4)


def test_an_admin_is_refused_inside_the_reply(bench: Any) -> None:
    request = admin_pb2.DescribeTopicRequest(name="nowhere")
    reply = bench.unary("DescribeTopic", request, admin_pb2.TopicReply)
    assert (reply.status.code, reply.status.message) == (
        Code.TOPIC_NOT_FOUND,
        "topic nowhere does not exist",
    )


def test_a_topic_is_made_at_the_broker_group_that_owns_topics(two_brokers: Any) -> None:
    owner, other = two_brokers.brokers.values()
    request = admin_pb2.CreateTopicRequest(topic=admin_pb2.Topic(name="new"))
    topic_reply = admin_pb2.TopicReply(topic=admin_pb2.Topic(name="new", queues=8))
    owner.tells[Kind.CREATE_TOPIC] = lambda _: topic_reply.SerializeToString()
    reply = two_brokers.unary("CreateTopic", request, admin_pb2.TopicReply)
    assert (reply.status.code, reply.topic.queues) == (Code.OK, 8)
    assert owner.bodies(Kind.CREATE_TOPIC) == [request.SerializeToString()]
    assert other.asked == []


def test_while_the_owner_is_away_nothing_is_made_elsewhere(two_brokers: Any) -> None:
    owner, other = two_brokers.brokers.values()
    owner.away = True
    request = admin_pb2.CreateGroupRequest(group=admin_pb2.Group(name="g"))
    reply = two_brokers.unary("CreateGroup", request, admin_pb2.GroupReply)
    assert reply.status.code == Code.HA_NOT_AVAILABLE
    assert other.asked == []


def test_dead_letters_are_deleted_at_every_broker_that_has_some(two_brokers: Any) -> None:
    first, second = two_brokers.brokers.values()
    first.tells[Kind.DELETE_TOPIC] = lambda _: Refused(Code.TOPIC_NOT_FOUND, "none")
    deleted = admin_pb2.TopicReply().SerializeToString()
    second.tells[Kind.DELETE_TOPIC] = lambda _: deleted
    request = admin_pb2.DeleteTopicRequest(name="%DLQ%g")
    assert two_brokers.unary("DeleteTopic", request, admin_pb2.TopicReply).status.code == Code.OK
    second.tells[Kind.DELETE_TOPIC] = lambda _: Refused(Code.BAD_REQUEST, "no")
    reply = two_brokers.unary("DeleteTopic", request, admin_pb2.TopicReply)
    assert (reply.status.code, reply.status.message) == (
        Code.BAD_REQUEST,
        "broker broker-b: no",
    )


def test_every_admin_method_of_the_definition_is_served(bench: Any) -> None:
    for name in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods_by_name:
        assert bench.methods[name].path == f"/popmq.admin.v1.Admin/{name}"


def large_consumer(names: int, group: str = "workers") -> pb.Settings:
    settings = consumer(group)
    for number in range(names):
        settings.subscription.subscriptions.add().topic.name = f"topic-{number}"
    settings.client_properties.update({f"key-{n}": "v" * 100 for n in range(100)})
    return settings


async def test_what_is_kept_of_the_settings_of_a_client_is_bounded(
    bench: Any, make_call: Any
) -> None:
    streams = [open_stream(bench, make_call)[1] for _ in range(20)]
    for inbound in streams:
        inbound.message(told(large_consumer(1_200)))
    await until_read(streams[-1])
    kept = [len(stream.kept) for stream in bench.proxy.telemetry.streams_of("me@1")]
    assert sum(kept) <= 64 << 10
    assert kept[-1] > 10_000
    (client,) = [item for item in bench.proxy.telemetry.mark_seen() if item.settings.subscription][
        -1:
    ]
    assert len(client.settings.subscription.subscriptions) == 1_000
    assert client.settings.subscription.group.name == "workers"
    assert not client.settings.client_properties
    for inbound in streams:
        inbound.half_closed()
    assert bench.proxy.telemetry._kept_bytes == 0


async def test_settings_of_very_many_parts_end_the_stream(bench: Any, make_call: Any) -> None:
    call, inbound = open_stream(bench, make_call)
    settings = pb.Settings(publishing=pb.Publishing(topics=[pb.Resource()] * 20_000))
    inbound.message(told(settings))
    await until_read(inbound)
    assert call.status is GrpcStatus.INVALID_ARGUMENT
    assert "fields" in call.detail


async def test_a_long_thread_dump_does_not_end_the_stream(bench: Any, make_call: Any) -> None:
    call, inbound = open_stream(bench, make_call)
    dump = service.TelemetryCommand()
    dump.thread_stack_trace.thread_stack_trace = "at com.example\n" * 50_000
    inbound.message(dump.SerializeToString())
    await until_read(inbound)
    assert call.status is None


def long_producer() -> pb.Settings:
    settings = producer()
    names = [pb.Resource(name=f"{number:060}") for number in range(100)]
    settings.publishing.topics.extend(names)
    return settings


async def test_one_long_command_is_read_in_each_turn_of_the_loop(
    bench: Any, make_call: Any
) -> None:
    """Each costs milliseconds, and others wait meanwhile (docs/security.md)."""
    calls = [open_stream(bench, make_call) for _ in range(20)]
    for _, inbound in calls:
        inbound.message(told(long_producer()))
    answered = [sum(bool(call.sent) for call, _ in calls)]
    for _ in calls:
        await asyncio.sleep(0)
        answered.append(sum(bool(call.sent) for call, _ in calls))
    assert answered == list(range(21))
    for call, _ in calls:
        answer(call)


async def test_a_stream_that_ends_behind_a_long_command_has_its_answer_first(
    bench: Any, make_call: Any
) -> None:
    call, inbound = open_stream(bench, make_call)
    inbound.message(told(long_producer()))
    inbound.message(told(producer()))
    inbound.half_closed()
    assert call.status is None
    await until_read(inbound)
    assert len(call.sent) == 2
    assert call.status is GrpcStatus.OK
    assert bench.proxy.metrics.open_streams == 0


async def test_a_stream_that_broke_is_passed_over(bench: Any, make_call: Any) -> None:
    call, inbound = open_stream(bench, make_call)
    inbound.message(told(long_producer()))
    call.leave()
    await until_read(inbound)
    assert call.sent == []


async def test_long_commands_that_wait_are_bounded(
    bench: Any, make_call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = told(long_producer())
    monkeypatch.setattr(stream_limits, "WAITING_LIMIT_BYTES", 2 * len(command))
    calls = [open_stream(bench, make_call) for _ in range(3)]
    for _, inbound in calls:
        inbound.message(command)
    assert [call.status for call, _ in calls] == [None, None, GrpcStatus.RESOURCE_EXHAUSTED]
    assert str(2 * len(command)) in calls[2][0].detail
    for _, inbound in calls:
        await until_read(inbound)
    assert [len(call.sent) for call, _ in calls] == [1, 1, 0]


def test_names_of_topics_of_all_producers_together_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishers, "NAMES_LIMIT", 2_500)
    table = publishers.Publishers(lambda sender: (), EveryRight())
    for number in range(10):
        for n in range(1_000):
            table.add_topic(publishers.Sender(f"client-{number}", ""), f"topic-{number}-{n}")
    assert sum(map(len, table._topics.values())) == 2_000
    assert [sender.client_id for sender in table._topics] == ["client-8", "client-9"]


def test_a_stream_keeps_only_the_names_of_its_newest_settings_for_its_rights(
    bench: Any, make_call: Any
) -> None:
    """Also while there are no users: they may come while it is open."""
    _, inbound = open_stream(bench, make_call)
    for number in range(50):
        settings = producer()
        settings.publishing.topics.add(name=f"topic-{number}")
        inbound.message(told(settings))
    inbound.message(service.TelemetryCommand().SerializeToString())
    (call,) = bench.proxy.access._open
    assert {need.name for need in call.needs} == {"orders", "topic-49"}
