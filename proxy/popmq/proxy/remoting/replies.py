"""SEND_REPLY_MESSAGE (324) and SEND_REPLY_MESSAGE_V2 (325): the answer to a request of an
application, which the proxy hands to the client that asked (326). Nothing is stored."""

from collections.abc import Mapping

from popmq.common.clock import Clock
from popmq.common.errors import Code, Refused
from popmq.common.settings.settings import MessageSettings, format_address
from popmq.proxy.remoting.clients import Clients
from popmq.proxy.remoting.frames import Command
from popmq.proxy.remoting.request import Request
from popmq.proxy.remoting.request_codes import RequestCode
from popmq.proxy.remoting.routes import Addresses
from popmq.proxy.remoting.sending import SendHeader
from popmq.proxy.remoting.stored_message import (
    format_properties,
    offset_message_id,
    parse_properties,
)

_PASSED_ON = (
    *("producerGroup", "topic", "defaultTopic", "defaultTopicQueueNums", "queueId", "sysFlag"),
    *("bornTimestamp", "flag", "reconsumeTimes", "unitMode"),
)
_DEFAULTS = {"reconsumeTimes": "0", "unitMode": "false"}


class Replies:
    def __init__(
        self, clients: Clients, addresses: Addresses, limits: MessageSettings, clock: Clock
    ) -> None:
        self._clients = clients
        self._addresses = addresses
        self._limits = limits
        self._clock = clock

    def reply_v1(self, request: Request) -> None:
        self._reply(SendHeader(request, short=False))

    def reply_v2(self, request: Request) -> None:
        self._reply(SendHeader(request, short=True))

    def _reply(self, header: SendHeader) -> None:
        request, properties = header.request, parse_properties(header.text("properties", ""))
        client_id = properties.get("REPLY_TO_CLIENT", "")
        if not client_id or not properties.get("CORRELATION_ID"):
            raise Refused(
                Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
                "a reply has the properties REPLY_TO_CLIENT and CORRELATION_ID of its request",
            )
        size, limit = len(request.command.body), self._limits.max_body_bytes
        if size > limit:
            raise Refused(
                Code.MESSAGE_BODY_TOO_LARGE,
                f"a reply of {size} bytes is over the limit of {limit} (message.max_body_bytes)",
            )
        push = Command(
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
            fields=self._fields(header, properties),
            body=request.command.body,
        )

        def taken(answer: Command) -> None:
            if answer.code:
                why = f"the client refused the reply: {answer.remark[:200]}"
                raise Refused(Code.BAD_REQUEST, why)
            host = self._addresses.of(request.connection)
            request.ok({"msgId": offset_message_id(host, 0), "queueId": "0", "queueOffset": "0"})

        self._clients.ask(request.rpc, client_id, push, taken)

    def _fields(self, header: SendHeader, properties: Mapping[str, str]) -> dict[str, str]:
        request, now_ms = header.request, str(self._clock.wall_ms())
        fields = {name: header.text(name, _DEFAULTS.get(name)) for name in _PASSED_ON}
        return {
            **fields,
            "properties": format_properties({**properties, "PUSH_REPLY_TIME": now_ms}),
            "bornHost": request.rpc.call.peer,
            "storeHost": format_address(*self._addresses.of(request.connection)),
            "storeTimestamp": now_ms,
        }
