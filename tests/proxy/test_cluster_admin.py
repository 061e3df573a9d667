"""What a proxy asks of controllers for an administrator, and of which."""

from typing import Any

import pytest

from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.settings.settings import Settings
from popmq.common.wire import admin_pb2, controller_pb2
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.proxy import Proxy

FOUND = controller_pb2.ListReplicasReply(groups=[controller_pb2.GroupState(group="shop")])
DONE = controller_pb2.FailoverReply(to_node="b")


class ToldController:
    def __init__(self, *answers: bytes | PopmqError) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[Kind, bytes]] = []

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self.asked.append((kind, body))
        on_reply(self.answers.pop(0))
        return 1

    def cancel(self, request_id: int) -> None: ...


def ask(bench: Any, make_call: Any, name: str, request: Any, *controllers: ToldController) -> Any:
    proxy = Proxy(Settings(), StaticBrokers({}), bench.clock, controllers)
    start = {method.path.rpartition("/")[2]: method.start for method in proxy.methods()}[name]
    assert start is not None
    call = make_call()
    start(call, request.SerializeToString())
    reply: Any = {"ListBrokers": admin_pb2.ListBrokersReply, "Failover": admin_pb2.FailoverReply}[
        name
    ]
    return reply.FromString(call.sent[0])


def test_the_first_controller_that_answers_counts(bench: Any, make_call: Any) -> None:
    away = ToldController(Unavailable("gone", unknown=True))
    here, unasked = ToldController(FOUND.SerializeToString()), ToldController()
    request = admin_pb2.ListBrokersRequest(group="shop")
    reply = ask(bench, make_call, "ListBrokers", request, away, here, unasked)
    assert (reply.status.code, reply.found) == (Code.OK, FOUND)
    ((kind, body),) = here.asked
    asked = controller_pb2.ListReplicasRequest.FromString(body)
    assert (kind, asked.cluster, asked.group) == (Kind.LIST_REPLICAS, "popmq", "shop")


def test_a_failover_is_passed_on_as_it_is(bench: Any, make_call: Any) -> None:
    controller = ToldController(DONE.SerializeToString())
    request = admin_pb2.FailoverRequest(group="shop", node="b", unclean=True, dry_run=True)
    reply = ask(bench, make_call, "Failover", request, controller)
    assert (reply.status.code, reply.done) == (Code.OK, DONE)
    asked = controller_pb2.FailoverRequest.FromString(controller.asked[0][1])
    assert asked == controller_pb2.FailoverRequest(
        cluster="popmq", group="shop", node="b", unclean=True, dry_run=True
    )


@pytest.mark.parametrize(
    ("answer", "again"),
    [
        (Unavailable("not connected"), True),
        (Refused(Code.NOT_FOUND, "unknown here"), True),
        (Unavailable("lost", unknown=True), False),
        (Refused(Code.PROXY_TIMEOUT, "late"), False),
        (Refused(Code.PRECONDITION_FAILED, "not in the set"), False),
    ],
    ids=["not connected", "unknown here", "lost", "late", "refused"],
)
def test_a_failover_that_may_have_been_done_is_asked_of_one_controller(
    bench: Any, make_call: Any, answer: PopmqError, again: bool
) -> None:
    first, second = ToldController(answer), ToldController(DONE.SerializeToString())
    request = admin_pb2.FailoverRequest(group="shop")
    reply = ask(bench, make_call, "Failover", request, first, second)
    assert bool(second.asked) is again
    assert reply.status.code == (Code.OK if again else answer.code)


def test_without_a_controller_the_setting_is_named(bench: Any, make_call: Any) -> None:
    reply = ask(bench, make_call, "ListBrokers", admin_pb2.ListBrokersRequest())
    assert reply.status.code == Code.HA_NOT_AVAILABLE
    assert "controller.addresses" in reply.status.message
