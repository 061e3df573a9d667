"""Every call, as every kind of caller, on both transports: the codes are written here by hand.

The table of the product is not imported.  Where a call is refused, the log has not grown.
"""

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message_factory import GetMessageClass
from security.callers import (
    CONSUMES,
    CREATE,
    FORBIDDEN,
    GET,
    GROUP,
    HANDLE,
    LIST,
    OK,
    PUB,
    QUEUE,
    REFUSALS,
    SUB,
    TOPIC,
    UNAUTHORIZED,
    UPDATE,
    A,
    C,
    Caller,
    Cluster,
    G,
    M,
    Needs,
    P,
    R,
    Row,
    T,
    entry,
    message,
)

from popmq.cli.client import Client
from popmq.common.signing import Signer
from popmq.common.wire import admin_pb2 as own
from popmq.common.wire import report_pb2 as report
from popmq.proxy.api import admin_pb2 as api
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

LEAST_CELLS = 900

BRIEF = Duration(nanos=1_000_000)
POLL: dict[str, Any] = {
    "group": GROUP,
    "message_queue": QUEUE,
    "batch_size": 1,
    "long_polling_timeout": BRIEF,
}
ENTRY = service.AckMessageEntry(receipt_handle=HANDLE)


def row(prefix: str, module: Any, name: str, needs: Needs, fields: dict[str, Any]) -> Row:
    """The classes of a method by the names of the protocol."""
    methods = next(iter(module.DESCRIPTOR.services_by_name.values())).methods_by_name
    method = methods[name]
    request, reply = map(GetMessageClass, (method.input_type, method.output_type))
    return Row(prefix + name, request(**fields), reply, needs, bool(method.server_streaming))


def messaging(name: str, needs: Needs, /, **fields: Any) -> Row:
    return row(M, service, name, needs, fields)


def public(name: str, needs: Needs, /, **fields: Any) -> Row:
    return row(P, api, name, needs, fields)


def admin(name: str, needs: Needs, /, **fields: Any) -> Row:
    return row(A, own, name, needs, fields)


def reports(name: str, needs: Needs, /, **fields: Any) -> Row:
    return row(R, report, name, needs, fields)


ROWS = [
    messaging("QueryRoute", [(T, SUB)], topic=TOPIC),
    messaging("QueryAssignment", CONSUMES, topic=TOPIC, group=GROUP),
    messaging("SendMessage", [(T, PUB)], messages=[message()]),
    messaging("ReceiveMessage", CONSUMES, **POLL),
    messaging("AckMessage", CONSUMES, group=GROUP, topic=TOPIC, entries=[ENTRY]),
    messaging("ChangeInvisibleDuration", CONSUMES, group=GROUP, topic=TOPIC, receipt_handle=HANDLE),
    messaging(
        "ForwardMessageToDeadLetterQueue", CONSUMES, group=GROUP, topic=TOPIC, receipt_handle=HANDLE
    ),
    messaging("EndTransaction", [(T, PUB)], topic=TOPIC, transaction_id="x", resolution=pb.COMMIT),
    messaging("RecallMessage", [(T, PUB)], topic=TOPIC, recall_handle="x"),
    messaging("Heartbeat", [], group=GROUP, client_type=pb.SIMPLE_CONSUMER),
    messaging("NotifyClientTermination", [], group=GROUP),
    messaging("PullMessage", CONSUMES, **POLL),
    messaging("UpdateOffset", [(G, ("sub", "update")), (T, SUB)], group=GROUP, message_queue=QUEUE),
    messaging("GetOffset", [(G, GET)], group=GROUP, message_queue=QUEUE),
    messaging("QueryOffset", [(T, GET)], message_queue=QUEUE),
    messaging("SyncLiteSubscription", CONSUMES, topic=TOPIC, group=GROUP),
    public("DescribeTopicStatus", [(T, GET)], topic=TOPIC),
    public("ListSubscription", [(T, GET), (G, GET)], topic=TOPIC, group=GROUP),
    public("DescribeSubscription", [(T, GET), (G, GET)], topic=TOPIC, group=GROUP),
    public("DescribeGroupAccumulation", [(G, GET)], group=GROUP),
    public("ListConsumerConnection", [(G, GET)], group=GROUP),
    public("ResetGroupOffset", [(G, UPDATE)], group=GROUP, topic=TOPIC),
    public("QueryMessage", [(T, SUB)], topic=TOPIC, message_id="x"),
    public("QueryTimeSpan", [(G, GET), (T, GET)], group=GROUP, topics=[TOPIC]),
    public("GetProxyRuntimeStats", [(C, GET)]),
    public("DeleteSubscription", [(G, UPDATE)], topic=TOPIC, group=GROUP),
    public("PrintThreadStackTrace", [(G, GET)], client_id="x", group=GROUP),
    public("VerifyMessage", [(T, SUB)], client_id="x", group=GROUP, topic=TOPIC),
    public("AdminSendMessage", [(T, PUB)], topic=TOPIC, body=b"x"),
    public("GetConsumerRunningInfo", [(G, GET)], group=GROUP, client_id="x"),
    admin("DescribeTopic", [(T, GET)], name="orders"),
    admin("CreateTopic", [(T, CREATE)], topic=own.Topic(name="orders")),
    admin("AlterTopic", [(T, UPDATE)], topic=own.Topic(name="orders")),
    admin("ListTopics", [(T, LIST)]),
    admin("DescribeGroup", [(G, GET)], name="billing"),
    admin("CreateGroup", [(G, CREATE)], group=own.Group(name="billing")),
    admin("AlterGroup", [(G, UPDATE)], group=own.Group(name="billing")),
    admin("ListGroups", [(G, LIST)]),
    admin(
        "Unpark", [(G, UPDATE), (T, SUB)], group="billing", topic="orders", key="k", action="resume"
    ),
    admin("FindMessages", [(T, SUB)], topic="orders", message_id="x"),
    admin("Explain", [(T, SUB)], topic="orders", message_id="01" * 17),
    admin("Lag", [(G, GET), (T, GET)], group="billing", topic="orders"),
    admin("TimeSpans", [(G, GET), (T, GET)], group="billing", topics=["orders"]),
    admin("ListClients", [(G, GET), (T, GET)], group="billing", topic="orders"),
    admin("ResetOffset", [(G, UPDATE)], group="billing", topic="orders", oldest=True, dry_run=True),
    admin("ListDeadLetters", [(G, SUB)], group="billing", bodies=True),
    admin("Redrive", [(G, UPDATE), (T, PUB)], group="billing", topic="orders", dry_run=True),
    admin("Recall", [(T, UPDATE)], topic="orders", message_id="x"),
    admin("Reschedule", [(T, UPDATE)], topic="orders", message_id="x", new_due_ms=-1000),
    admin("ListTimers", [(T, GET)], topic="orders"),
    admin("ForecastTimers", [(T, GET)], topic="orders"),
    admin("Drain", [(C, GET)], group="broker-a", look=True),
    admin("RotateKeys", [(C, GET)], look=True),
    admin("ResealSecrets", [(C, UPDATE)]),
    admin("ListBrokers", [(C, GET)]),
    admin("Failover", [(C, UPDATE)], group="broker-a", dry_run=True),
    admin("DescribeSettings", [(C, GET)]),
    admin("CreateUser", [(C, UPDATE)], name="admin"),
    admin("AlterUser", [(C, UPDATE)], name="nobody"),
    admin("DeleteUser", [(C, UPDATE)], name="nobody"),
    admin("DescribeUser", [(C, GET)], name="admin"),
    admin("ListUsers", [(C, GET)]),
    admin("Grant", [(C, UPDATE)], name="nobody"),
    admin("Revoke", [(C, UPDATE)], name="nobody", all=True),
    admin("SetUserClock", [(C, UPDATE)], name="nobody"),
    admin("CheckAccess", [(C, GET)], user="admin", action="pub", resource=T),
    reports("Describe", [(C, GET)]),
    reports("Names", [(C, GET)]),
    reports("ReadRaw", [("topic:*", SUB)], broker="broker-a"),
]


def allowing(row: Row) -> list[own.UserEntry]:
    return [entry(resource, *actions) for resource, actions in row.needs]


def kind(row: Row) -> str:
    """Rows with the same needs share their users."""
    return (
        "-".join(f"{r}.{'.'.join(a)}" for r, a in row.needs).replace(":", ".").replace("*", "all")
    )


def strangers(cluster: Cluster) -> dict[str, tuple[Caller, int]]:
    """Callers that may call nothing, whatever the call."""
    known = cluster.user("known")
    disabled = cluster.user("disabled")
    cluster.client.call_admin(
        own.AlterUserRequest(name="disabled", state="disabled"), own.UserReply
    )
    retired = cluster.user("retired")
    change = own.AlterUserRequest(name="retired", secret="the-next-secret-of-it", retire_ms=0)
    cluster.client.call_admin(change, own.UserReply)
    elsewhere = cluster.user("elsewhere", networks=["192.0.2.0/24"])
    set_ = cluster.user("set")
    cluster.client.call_admin(own.SetUserClockRequest(name="set", add=[0]), own.UserReply)
    learned = cluster.user("learned")
    heartbeat = next(row for row in ROWS if row.name == "Heartbeat")
    assert cluster.code(heartbeat, learned) == OK
    late = {
        f"{name} {minutes} min old": (
            Caller(user.access_key, user.secret, -60 * minutes),
            UNAUTHORIZED,
        )
        for name, user in (("set", set_), ("learned", learned))
        for minutes in (3, 30, 60)
    }
    return {
        "no header": (Caller(), UNAUTHORIZED),
        "empty credential": (Caller(""), UNAUTHORIZED),
        "unknown user": (Caller("mallory", "x" * 20), UNAUTHORIZED),
        "wrong secret": (Caller("known", "x" * 20), UNAUTHORIZED),
        "signature of another date": (
            Caller("known", known.secret, signed="20200101T000000Z"),
            UNAUTHORIZED,
        ),
        "old secret after its time": (retired, UNAUTHORIZED),
        "disabled": (disabled, UNAUTHORIZED),
        "another network": (elsewhere, FORBIDDEN),
        **late,
    }


@pytest.mark.more
def test_no_stranger_can_call_anything(cluster: Cluster) -> None:
    callers = strangers(cluster)
    before, wrong, cells = cluster.log_end(), [], 0
    for row in ROWS:
        for name, (caller, expected) in callers.items():
            code = cluster.code(row, caller)
            cells += 1
            if code != expected:
                wrong.append((row.name, name, code))
    assert not wrong
    assert cluster.log_end() == before
    print(f"{cells} cells")
    assert cells >= LEAST_CELLS


@pytest.mark.more
def test_a_user_can_call_what_its_entries_allow_and_a_deny_wins(cluster: Cluster) -> None:
    wrong, cells = [], 0
    for row in filter(lambda row: row.needs, ROWS):
        name, allowed = kind(row), allowing(row)
        # Each need by itself is refused by a Deny, before or behind, narrow or wide.
        resource, actions = row.needs[-1]
        wide = resource if resource == C else f"{resource.partition(':')[0]}:*"
        denied = [entry(where, *actions, deny=True) for where in (resource, wide)]
        callers = {
            "no policy": (cluster.user("known"), FORBIDDEN),
            "part": (cluster.user(f"{name}-part", *allowed[1:]), FORBIDDEN),
            "narrow deny last": (cluster.user(f"{name}-nl", *allowed, denied[0]), FORBIDDEN),
            "narrow deny first": (cluster.user(f"{name}-nf", denied[0], *allowed), FORBIDDEN),
            "wide deny last": (cluster.user(f"{name}-wl", *allowed, denied[1]), FORBIDDEN),
            "wide deny first": (cluster.user(f"{name}-wf", denied[1], *allowed), FORBIDDEN),
        }
        before = cluster.log_end()
        for label, (caller, expected) in callers.items():
            code = cluster.code(row, caller)
            cells += 1
            if code != expected:
                wrong.append((row.name, label, code))
        assert cluster.log_end() == before, row.name
        code = cluster.code(row, cluster.user(f"{name}-yes", *allowed))
        cells += 1
        if code in REFUSALS:
            wrong.append((row.name, "allowed", code))
    assert not wrong
    print(f"{cells} cells")


@pytest.mark.more
def test_a_name_in_another_namespace_is_another_name(cluster: Cluster) -> None:
    """The header proves nothing: it only makes the name longer."""
    wrong = []
    for row in (row for row in ROWS if row.path.startswith((M, P)) and row.needs):
        if C in dict(row.needs):
            continue
        caller = cluster.user(f"{kind(row)}-yes", *allowing(row))
        code = cluster.code(row, caller, [("x-mq-namespace", "team")])
        if code != FORBIDDEN:
            wrong.append((row.name, code))
    assert not wrong


def test_an_older_secret_is_good_until_its_end(cluster: Cluster) -> None:
    user = cluster.user("rotating")
    change = own.AlterUserRequest(
        name="rotating", secret="the-next-secret-of-it", retire_ms=3_600_000
    )
    cluster.client.call_admin(change, own.UserReply)
    heartbeat = next(row for row in ROWS if row.name == "Heartbeat")
    assert cluster.code(heartbeat, user) == OK
    assert cluster.code(heartbeat, Caller("rotating", "the-next-secret-of-it")) == OK


def test_a_batch_with_one_forbidden_topic_is_refused_and_stores_nothing(cluster: Cluster) -> None:
    user = cluster.user("publisher", entry(T, "pub"))
    for topics in (("orders", "secret"), ("secret", "orders"), ("secret",)):
        request = service.SendMessageRequest(messages=map(message, topics))
        row = Row(M + "SendMessage", request, service.SendMessageResponse)
        before = cluster.log_end()
        assert cluster.code(row, user) == FORBIDDEN, topics
        assert cluster.log_end() == before


def test_a_forbidden_name_has_one_answer_whether_it_exists_or_not(cluster: Cluster) -> None:
    user = cluster.user("publisher", entry(T, "pub"))
    cluster.client.topic(own.CreateTopicRequest(topic=own.Topic(name=f"secret{id(cluster)}")))
    texts = set()
    for name in (f"secret{id(cluster)}", f"absent{id(cluster)}"):
        request = service.QueryRouteRequest(topic=pb.Resource(name=name))
        answer = cluster.channel.unary_unary(M + "QueryRoute")(
            request.SerializeToString(), metadata=user.headers(), timeout=30
        )
        status = service.QueryRouteResponse.FromString(answer).status
        assert status.code == FORBIDDEN
        texts.add(status.message.replace(name, "NAME"))
    assert len(texts) == 1


def test_a_list_shows_what_get_allows_and_nothing_else(cluster: Cluster) -> None:
    cluster.client.topic(own.CreateTopicRequest(topic=own.Topic(name=f"hidden{id(cluster)}")))
    user = cluster.user("lister", entry(T, "get", "list"))
    signer = Signer(user.access_key or "", user.secret)
    with Client(cluster.broker.endpoint, signer=signer) as client:
        assert [topic.name for topic in client.topics(system=False)] == ["orders"]
