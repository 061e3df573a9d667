"""Which client is at which connection, and requests to a client, wherever it is connected.

A client of another proxy is asked through the broker group that owns the topics
(broker/operations/client_relay.py): this proxy leaves its request there, and waits there for those
of others to its own clients.  Nothing is stored; what gets no answer in time is over.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial

from google.protobuf.message import DecodeError

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.wire import relay_pb2 as wire
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.remoting.connection import RemotingConnection
from popmq.proxy.remoting.frames import BadFrame, Command, FrameReader, encode
from popmq.proxy.remoting.owner_wait import TIMEOUT_MS, WAIT_MS, OwnerWait
from popmq.proxy.rpc.convert import read_reply
from popmq.proxy.rpc.rpc import Answer, Rpc

logger = logging.getLogger(__name__)

RELAY_RESERVE_MS = 200  # of the time that the asking client has
CLIENT_TIMEOUT_MS = 3_000  # of a request that came from another proxy


class Clients(OwnerWait):
    def __init__(self, brokers: BrokerPorts) -> None:
        super().__init__(brokers)
        self._name = secrets.token_hex(8)
        # The connection of the latest heartbeat is the last one.
        self._connections: dict[str, dict[RemotingConnection, None]] = {}
        self._absent: list[wire.ClientOutcome] = []  # for the next wait

    def connect(self, client_id: str, connection: RemotingConnection) -> None:
        connections = self._connections.setdefault(client_id, {})
        connections.pop(connection, None)
        connections[connection] = None
        # Before the client goes on: a reply to its first request may come within milliseconds.
        self.ask_again()

    def disconnect(self, client_id: str, connection: RemotingConnection) -> None:
        connections = self._connections.get(client_id, {})
        connections.pop(connection, None)
        if not connections:
            self._connections.pop(client_id, None)

    def ask(
        self, rpc: Rpc, client_id: str, command: Command, then: Callable[[Command], None]
    ) -> None:
        """`then` gets the client's answer. It is BAD_REQUEST where no proxy has the client."""
        absent = Refused(
            Code.BAD_REQUEST, f"client {client_id[:100]!r} is not connected, or does not answer"
        )

        def decided(answer: Command | None) -> None:
            if answer is None:
                raise absent
            then(answer)

        connection = self._connection(client_id)
        if connection is not None:
            _ask(connection, command, rpc.timeout_ms(), partial(rpc.run, decided))
            return

        def relayed(answer: Answer) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            reply = read_reply(wire.AskClientReply, answer)
            decided(None if reply.absent else _command(reply.answer))

        owner = self._brokers.owner()
        if not owner:
            raise absent
        timeout_ms = rpc.timeout_ms()
        asked = wire.AskClientRequest(
            client_id=client_id,
            wait_ms=max(1, timeout_ms - RELAY_RESERVE_MS),
            request=encode(command),
        )
        port, body = self._brokers.port(owner), asked.SerializeToString()
        rpc.send_request(port, Kind.ASK_CLIENT, body, timeout_ms, relayed)

    def _connection(self, client_id: str) -> RemotingConnection | None:
        return next(reversed(self._connections.get(client_id, {})), None)

    # -- requests of other proxies

    def ask_owner(self) -> None:
        """While there are clients here; an answer is followed by the next request."""
        owner = self._brokers.owner()
        if not owner or not (self._connections or self._absent):
            return
        try:
            port = self._brokers.port(owner)
        except PopmqError:
            return
        asked = wire.ClientRequestsRequest(proxy=self._name, wait_ms=WAIT_MS, outcomes=self._absent)
        self._absent = []

        def answered(answer: bytes | PopmqError) -> None:
            if isinstance(answer, bytes) and self.runs:
                self._take(port, answer)
                asyncio.get_running_loop().call_soon(self.ask_again)

        body = asked.SerializeToString()
        self.wait_at(owner, port, Kind.CLIENT_REQUESTS, body, answered)

    def _take(self, port: Port, answer: bytes) -> None:
        try:
            requests: Sequence[wire.ClientRequest]
            requests = wire.ClientRequestsReply.FromString(answer).requests
            commands = [_command(request.request) for request in requests]
        except (DecodeError, BadFrame):
            logger.error("the owner's requests to clients cannot be read")
            return
        for request, command in zip(requests, commands, strict=True):
            connection = self._connection(request.client_id)
            if connection is None:
                self._absent.append(wire.ClientOutcome(number=request.number, absent=True))
            else:
                then = partial(_report, port, self._name, request.number)
                _ask(connection, command, CLIENT_TIMEOUT_MS, then)


def _ask(
    connection: RemotingConnection,
    command: Command,
    timeout_ms: int,
    then: Callable[[Command | None], None],
) -> None:
    connection.ask(command.code, command.fields, command.body, timeout_ms, then)


def _report(port: Port, proxy: str, number: int, answer: Command | None) -> None:
    outcome = wire.ClientOutcome(
        number=number, absent=answer is None, answer=b"" if answer is None else encode(answer)
    )
    body = wire.ClientRequestsRequest(proxy=proxy, outcomes=[outcome]).SerializeToString()
    # The request at the broker ends by its time, should this be lost.
    port.request(Kind.CLIENT_REQUESTS, body, TIMEOUT_MS, lambda _: None)


def _command(frame: bytes) -> Command:
    """Raises BadFrame."""
    commands = list(FrameReader().feed(frame))
    if len(commands) != 1:
        raise BadFrame("not one frame")
    return commands[0]
