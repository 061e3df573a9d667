"""BrokerServer: requests in frames' payloads, answers when they are confirmed.

Implements `messaging_payloads.Port`, so a proxy in the same process calls it directly and frames
serve it to all others.  Each reply leaves through the `on_reply` of its request, mostly when its
records are confirmed (docs/ARCHITECTURE.md).
"""

from functools import partial

from google.protobuf.message import DecodeError

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.client_requests import ClientRequests
from popmq.broker.handlers.pull_requests import lease
from popmq.broker.handlers.receive import Receives
from popmq.broker.handlers.registry import HANDLERS
from popmq.broker.handlers.request import (
    MemoryReplies,
    NoReplicas,
    Request,
    WaitingRequests,
    refuse,
)
from popmq.broker.handlers.request_runner import RequestRunner
from popmq.common.disk import is_shortage
from popmq.common.errors import Code, PopmqError, Refused, TooManyRequests
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.topics import Durability, MessageType


class BrokerServer:
    def __init__(self, broker: Broker, memory: MemoryReplies | None = None) -> None:
        """`memory` is of a broker with replicas."""
        self._broker = broker
        self._memory = memory or NoReplicas()
        self._number = 0
        self._waiting: WaitingRequests = {}
        self._clients = ClientRequests(broker)
        self._receives = Receives(broker, self._clients, self._memory, self._waiting)
        self.runner = RequestRunner(broker.store, broker.buffer.flush_acks)
        self.refused_by_code: dict[int, int] = {}

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        """Serve one request; a refusal that rests on confirmed records is answered at once."""
        self._number += 1
        try:
            self._serve(kind, body, on_reply, self._number)
        except DecodeError:
            self._refuse(Refused(Code.BAD_REQUEST, f"the request is no {kind.name}"), on_reply)
        except PopmqError as error:
            self._refuse(error, on_reply)
        except OSError as error:
            if not is_shortage(error):
                raise
            shortage = TooManyRequests(f"{self._broker.settings.broker.data}: {error}; try again")
            self._refuse(shortage, on_reply)
        return self._number

    def _refuse(self, error: PopmqError, on_reply: OnReply) -> None:
        self.refused_by_code[error.code] = self.refused_by_code.get(error.code, 0) + 1
        refuse(error, on_reply, self._broker.store)

    def cancel(self, request_id: int) -> None:
        """Its client has left: it waits no more, and what it popped comes back."""
        cancel = self._waiting.pop(request_id, None)
        if cancel is not None:
            cancel()
        else:
            self._broker.pop.pop_rollback.cancel(request_id)

    def answer_lost(self, request_id: int) -> None:
        """The connection broke after this receive was answered: its answer may be lost."""
        self._broker.pop.pop_rollback.doubt(request_id, self._broker.store.log_ms())

    def end(self) -> None:
        """This broker leads no more: nothing goes on by itself."""
        self._receives.ended = True

    def _serve(self, kind: Kind, body: bytes, on_reply: OnReply, number: int) -> None:
        match kind:
            case Kind.PUT:
                self._put(hop.decode_put(body), on_reply)
            case Kind.POP:
                self._receives.serve(hop.decode_pop(body), on_reply, number)
            case Kind.ACK:
                self._take_acks(hop.decode_ack(body), on_reply)
            case Kind.LEASE:
                reply = lease(self._broker, body)
                self._memory.when_leadership_confirmed(partial(on_reply, reply))
            case _:
                self._handle(Request(kind, body, number, on_reply, self._waiting))

    def _handle(self, request: Request) -> None:
        handler = HANDLERS.get(request.kind)
        if handler is None:
            raise Refused(
                Code.UNSUPPORTED, f"a broker does not serve requests of kind {request.kind}"
            )
        reply = self.runner.call(handler, self._broker, request)
        if reply is not None:
            self._reply(request.on_reply, reply)

    def _reply(self, on_reply: OnReply, reply: bytes) -> None:
        """Release the reply once everything it rests on is confirmed (D2)."""
        self._broker.buffer.when_acks_confirmed(partial(on_reply, reply))

    def _put(self, request: hop.PutRequest, on_reply: OnReply) -> None:
        results = self._clients.put(request)
        self._broker.pop.catch_up.on_fresh_traffic()
        reply = hop.encode_put_reply(results)
        topic = self._broker.registry.topic(request.topic)
        if topic.durability is Durability.MEMORY and not any(map(_is_half, request.entries)):
            self._memory.when_in_memory(partial(on_reply, reply))
        else:
            self._reply(on_reply, reply)

    def _take_acks(self, request: hop.AckRequest, on_reply: OnReply) -> None:
        self._broker.metadata_resolver.check_group_copied(request.group, request.group_id)
        catch_up = self._broker.pop.catch_up
        if catch_up.is_behind((request.group, request.topic)):
            catch_up.charge(lambda: self._ack(request, on_reply))
        else:
            self._ack(request, on_reply)

    def _ack(self, request: hop.AckRequest, on_reply: OnReply) -> None:
        results = self._broker.pop.acks.ack(
            topic=request.topic, group=request.group, handles=request.handles
        )
        self._reply(on_reply, hop.encode_ack_reply(results))


def _is_half(entry: hop.PutEntry) -> bool:
    """A half message is on disks before its sender acts on it."""
    return entry.type == MessageType.TRANSACTION
