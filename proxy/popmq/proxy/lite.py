"""SyncLiteSubscription: which lite topics of a parent topic a client wants.

Clients ask any proxy and receive through another one, so nothing is kept here: every broker group
is told, since each has lite topics of its own.  It is OK when all that have a master took it.
"""

from collections.abc import Sequence
from functools import partial

from popmq.common.errors import NotYet, PopmqError, Unavailable
from popmq.common.hop import Kind
from popmq.common.topics import check_group_name, check_lite_topic_name, check_topic_name
from popmq.common.wire.lite_pb2 import SyncLite
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers import Brokers
from popmq.proxy.convert import name_of, ok, parse
from popmq.proxy.rpc import Answer, Rpc

_LANGUAGE = "x-mq-language"
_POLICY = pb.OffsetOption.Policy


class SyncLiteSubscription:
    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    def start(self, rpc: Rpc) -> None:
        request = parse(service.SyncLiteSubscriptionRequest, rpc.data)
        body = _sync_of(rpc, request).SerializeToString()
        names = self._brokers.names()
        if not names:
            raise Unavailable("no broker is known yet")
        timeout_ms = rpc.timeout_ms()
        # One that is away hears of it within 30 s of its return: clients say everything again.
        here = [name for name in names if self._brokers.has_master(name)] or names
        ports = [self._brokers.port(name) for name in here]
        answers: list[Answer] = []
        then = partial(_answered, rpc, answers, len(ports))
        for port in ports:
            rpc.ask(port, Kind.SYNC_LITE, body, timeout_ms, then)


def _sync_of(rpc: Rpc, request: service.SyncLiteSubscriptionRequest) -> SyncLite:
    topic, group = name_of(request.topic), name_of(request.group)
    check_topic_name(topic)
    check_group_name(group)
    adds = request.action in (
        pb.LiteSubscriptionAction.PARTIAL_ADD,
        pb.LiteSubscriptionAction.COMPLETE_ADD,
    )
    names = _names_of(rpc, request)
    if adds:
        for name in names:
            check_lite_topic_name(name)
    sync = SyncLite(
        topic=topic,
        group=group,
        client_id=rpc.client_id,
        action=request.action,
        names=names,
    )
    _add_begin(sync, request.offset_option)
    return sync


def _names_of(rpc: Rpc, request: service.SyncLiteSubscriptionRequest) -> Sequence[str]:
    """The lite topics that the client means.

    `subscribe_lite` of the Python client (5.1.2) says the one name letter by letter, as so many
    names; only what it says again every 30 s has it whole.
    """
    names = request.lite_topic_set
    added = request.action == pb.LiteSubscriptionAction.PARTIAL_ADD
    if added and rpc.call.metadata.get(_LANGUAGE) == "PYTHON" and {*map(len, names)} == {1}:
        return ["".join(names)]
    return names


def _add_begin(sync: SyncLite, option: pb.OffsetOption) -> None:
    """Where the group begins in what it never read; LAST is where it was, which needs no word."""
    match option.WhichOneof("offset_type"):
        case "policy" if option.policy != _POLICY.LAST:
            sync.newest = option.policy == _POLICY.MAX
        case "offset":
            sync.offset = max(0, option.offset)
        case "tail_n":
            sync.tail = max(0, option.tail_n)
        case "timestamp":
            raise NotYet("a subscription to a lite topic cannot begin at a time yet")


def _answered(rpc: Rpc, answers: list[Answer], count: int, answer: Answer) -> None:
    """The last one ends it: with a refusal, if one of them was."""
    answers.append(answer)
    if len(answers) < count:
        return
    for one in answers:
        if isinstance(one, PopmqError):
            raise one
    rpc.reply(service.SyncLiteSubscriptionResponse(status=ok()).SerializeToString())
