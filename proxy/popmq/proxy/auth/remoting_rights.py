"""The same for Remoting: what a request code needs, and the signature of its clients.

AccessKey and Signature are fields of the request.  The signature is HMAC-SHA1, in base64, over the
values of all other fields in the order of their names, and the body (RocketMQ: AclUtils).
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from popmq.common.errors import Code, Refused
from popmq.proxy.auth.policy import EVERY, Need, group_need, topic_need
from popmq.proxy.auth.rights import ANY_USE, GET, PUB, SUB, SUB_OR_GET, UPDATE

ACCESS_KEY, SIGNATURE = "AccessKey", "Signature"
# Clients before 4.9.4 add this field behind the signature.
UNSIGNED = "_UNIQUE_KEY_QUERY"


class RemotingRequest(NamedTuple):
    code: int
    fields: Mapping[str, str]
    body: bytes

    def text(self, name: str) -> str:
        return self.fields.get(name, "")

    def content(self) -> Mapping[str, Any]:
        """Of a body in JSON. Raises BAD_REQUEST."""
        try:
            content = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise Refused(Code.BAD_REQUEST, f"the body is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise Refused(Code.BAD_REQUEST, "the body is no JSON object")
        return content


Needs = Callable[[RemotingRequest], Iterator[Need]]


def signed_contents(request: RemotingRequest) -> Sequence[bytes]:
    """What the signature may be of: older clients do not sign one of the fields."""
    names = sorted(name for name in request.fields if name != SIGNATURE)
    texts = ["".join(request.fields[name] for name in names)]
    if UNSIGNED in request.fields:
        texts.append("".join(request.fields[name] for name in names if name != UNSIGNED))
    return [text.encode(errors="surrogatepass") + request.body for text in texts]


def signature_bytes(request: RemotingRequest) -> bytes:
    """Empty for what is no base64: it matches nothing."""
    try:
        return base64.b64decode(request.text(SIGNATURE), validate=True)
    except (binascii.Error, ValueError):
        return b""


def _sent(name: str) -> Need:
    """A consumer sends messages back to a topic of its own group."""
    need = topic_need(PUB, name)
    return need._replace(actions=SUB) if need.kind == "group" else need


def _sends(field: str, request: RemotingRequest) -> Iterator[Need]:
    yield _sent(request.text(field))


def _topic(actions: tuple[str, ...], request: RemotingRequest) -> Iterator[Need]:
    yield topic_need(actions, request.text("topic"))


def _group(actions: tuple[str, ...], request: RemotingRequest) -> Iterator[Need]:
    yield group_need(actions, request.text("consumerGroup"))


def _consumes(request: RemotingRequest) -> Iterator[Need]:
    yield group_need(SUB, request.text("consumerGroup"))
    yield topic_need(SUB, request.text("topic"))


def _updates_offset(request: RemotingRequest) -> Iterator[Need]:
    yield from _consumes(request)
    yield group_need(UPDATE, request.text("consumerGroup"))


def _named_in_body(request: RemotingRequest) -> Iterator[Need]:
    content = request.content()
    yield group_need(SUB, str(content.get("consumerGroup", "")))
    yield topic_need(SUB, str(content.get("topic", "")))


def _checks_client(request: RemotingRequest) -> Iterator[Need]:
    content = request.content()
    yield group_need(SUB, str(content.get("group", "")))
    yield topic_need(SUB, str(_object(content.get("subscriptionData")).get("topic", "")))


def _locks(request: RemotingRequest) -> Iterator[Need]:
    content = request.content()
    yield group_need(SUB, str(content.get("consumerGroup", "")))
    for queue in _list(content.get("mqSet")):
        yield topic_need(SUB, str(_object(queue).get("topic", "")))


def _returns(request: RemotingRequest) -> Iterator[Need]:
    yield group_need(SUB, request.text("group"))
    if origin := request.text("originTopic"):
        yield topic_need(SUB, origin)


def _views(request: RemotingRequest) -> Iterator[Need]:
    """The request names a position in the log, where a message of any topic may be."""
    yield Need(SUB, "topic", EVERY)


def _ends(request: RemotingRequest) -> Iterator[Need]:
    """Older clients do not say which topic it is."""
    topic = request.text("topic")
    yield topic_need(PUB, topic) if topic else Need(PUB, "topic", EVERY)


def _joins(request: RemotingRequest) -> Iterator[Need]:
    """A heartbeat makes its client a member of groups, which gets a share of their queues."""
    for consumer in _list(request.content().get("consumerDataSet")):
        data = _object(consumer)
        yield group_need(SUB, str(data.get("groupName", "")))
        for subscription in _list(data.get("subscriptionDataSet")):
            yield topic_need(SUB, str(_object(subscription).get("topic", "")))


def _nothing(_request: RemotingRequest) -> Iterator[Need]:
    return iter(())


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


HEART_BEAT = 34
# By the numbers of remoting/request_codes.py; docs/concepts/users.md says it for people.
REMOTING_RIGHTS: Mapping[int, Needs] = {
    105: partial(_topic, ANY_USE),  # GET_ROUTEINFO_BY_TOPIC
    10: partial(_sends, "topic"),  # SEND_MESSAGE
    310: partial(_sends, "b"),  # SEND_MESSAGE_V2
    320: partial(_sends, "b"),  # SEND_BATCH_MESSAGE
    324: partial(_sends, "topic"),  # SEND_REPLY_MESSAGE
    325: partial(_sends, "b"),  # SEND_REPLY_MESSAGE_V2
    12: partial(_topic, SUB),  # QUERY_MESSAGE
    32: partial(_topic, SUB_OR_GET),  # GET_EARLIEST_MSG_STORETIME
    307: partial(_group, GET),  # GET_CONSUMER_RUNNING_INFO
    11: _consumes,  # PULL_MESSAGE
    361: _consumes,  # LITE_PULL_MESSAGE
    200050: _consumes,  # POP_MESSAGE
    200051: _consumes,  # ACK_MESSAGE
    200053: _consumes,  # CHANGE_MESSAGE_INVISIBLETIME
    400: _named_in_body,  # QUERY_ASSIGNMENT
    401: _named_in_body,  # SET_MESSAGE_REQUEST_MODE
    14: partial(_group, SUB_OR_GET),  # QUERY_CONSUMER_OFFSET
    15: _updates_offset,  # UPDATE_CONSUMER_OFFSET
    29: partial(_topic, SUB_OR_GET),  # SEARCH_OFFSET_BY_TIMESTAMP
    30: partial(_topic, SUB_OR_GET),  # GET_MAX_OFFSET
    31: partial(_topic, SUB_OR_GET),  # GET_MIN_OFFSET
    46: _checks_client,  # CHECK_CLIENT_CONFIG
    41: _locks,  # LOCK_BATCH_MQ
    42: _locks,  # UNLOCK_BATCH_MQ
    36: _returns,  # CONSUMER_SEND_MSG_BACK
    33: _views,  # VIEW_MESSAGE_BY_ID
    38: partial(_group, SUB_OR_GET),  # GET_CONSUMER_LIST_BY_GROUP
    370: partial(_topic, PUB),  # RECALL_MESSAGE
    37: _ends,  # END_TRANSACTION
    HEART_BEAT: _joins,
    35: _nothing,  # UNREGISTER_CLIENT: of its own connection
}
HELD = frozenset({11, 361, 200050})  # requests that wait for messages
