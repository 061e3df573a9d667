"""ForwardMessageToDeadLetterQueue: a consumer gives a message up for its group.

Clients repeat it for ever on everything but OK and INVALID_RECEIPT_HANDLE, like an ack.
"""

from functools import partial

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import AckRequest, Kind, decode_ack_reply, encode_ack
from popmq.common.topics import check_group_name, check_readable_topic_name
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers.broker_ports import BrokerPorts, broker_of_handle
from popmq.proxy.messaging.ack import handle_bytes
from popmq.proxy.rpc.convert import name_of, ok, parse
from popmq.proxy.rpc.rpc import Answer, Rpc


class ForwardToDeadLetterQueue:
    """The broker knows the attempt by the handle; the numbers that a client sends are not used."""

    def __init__(self, brokers: BrokerPorts) -> None:
        self._brokers = brokers

    def start(self, rpc: Rpc) -> None:
        request = parse(service.ForwardMessageToDeadLetterQueueRequest, rpc.data)
        topic, group = name_of(request.topic), name_of(request.group)
        check_readable_topic_name(topic)
        check_group_name(group)
        handle = handle_bytes(request.receipt_handle)
        _, port = broker_of_handle(self._brokers, handle)
        body = encode_ack(AckRequest(topic, group, [handle]))
        rpc.send_request(port, Kind.REJECT, body, rpc.timeout_ms(), partial(_answered, rpc))


def _answered(rpc: Rpc, answer: Answer) -> None:
    if isinstance(answer, PopmqError):
        raise answer
    (result,) = decode_ack_reply(answer)
    if result.code != Code.OK:
        raise Refused(Code(result.code), result.message)
    reply = service.ForwardMessageToDeadLetterQueueResponse(status=ok())
    rpc.reply(reply.SerializeToString())
