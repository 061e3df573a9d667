"""Gate: the `Port` of a broker with replicas, for clients of a master, slaves and controllers.

A request for a part that is closed or detached is refused with NOT_MASTER: nothing was done, and
the requester looks for the master.
"""

from collections.abc import Callable

from popmq.common.errors import NotMaster, PopmqError
from popmq.common.protocol.messaging_payloads import Kind, OnReply, Port
from popmq.common.wire.admin_pb2 import RotateKeysRequest

REPLICATION_KINDS = frozenset(
    (Kind.HANDSHAKE, Kind.FETCH, Kind.ACKED, Kind.READ_SNAPSHOT, Kind.TIMER_CHECK_POINT)
)
_STORING_KINDS = frozenset((Kind.PUT, Kind.TAKE_TIMERS))
NODE_KINDS = frozenset((Kind.HAND_OVER, Kind.DESCRIBE_ROLE))
_READ_KEYS = RotateKeysRequest(look=True).SerializeToString()
_IDS_PER_GENERATION = 1 << 48  # generation n has the ids from n * 2^48 on


class GatedPort:
    """Forwards requests to one part of the broker.

    While it is closed, `Gate` refuses new requests, and running ones are still answered.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._port: Port | None = None
        self._open = False

    def open(self, port: Port) -> None:
        """Forward to `port` from now on. Ids of requests to an earlier port become invalid."""
        if port is not self._port:
            self._generation += 1
            self._port = port
        self._open = True

    def close(self) -> None:
        self._open = False

    def detach(self) -> None:
        """The part has stopped, and its requests have ended."""
        self._port, self._open = None, False

    @property
    def is_open(self) -> bool:
        return self._open

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        assert self._port is not None
        # Read before the call, during which the part may detach or replace itself here.
        generation = self._generation
        return generation * _IDS_PER_GENERATION + self._port.request(
            kind, body, timeout_ms, on_reply
        )

    def cancel(self, request_id: int) -> None:
        generation, number = divmod(request_id, _IDS_PER_GENERATION)
        if self._port is not None and generation == self._generation:
            self._port.cancel(number)

    def own_id(self, request_id: int) -> int | None:
        """The port's own id of the request; None if the request went to an earlier port."""
        generation, number = divmod(request_id, _IDS_PER_GENERATION)
        return number if generation == self._generation else None


class Gate:
    """`clients` and `slaves` are open while this broker serves them.

    `serve_node` serves NODE_KINDS. `closed_reason` is the error text of refused requests.
    """

    def __init__(self, serve_node: Callable[[Kind, bytes, OnReply], None]) -> None:
        self._serve_node = serve_node
        self.clients = GatedPort()
        self.slaves = GatedPort()
        self.check_send_quorum: Callable[[], None] = lambda: None
        self.check_signing_keys: Callable[[], None] = lambda: None
        self.closed_reason = "this broker has not been made master yet"
        self.refused_by_code: dict[int, int] = {}

    def open_clients(
        self,
        port: Port,
        check_send_quorum: Callable[[], None],
        check_signing_keys: Callable[[], None],
    ) -> None:
        """`check_send_quorum` raises if a send could not be confirmed now, and
        `check_signing_keys` if a slave would ignore a new key."""
        self.check_send_quorum = check_send_quorum
        self.check_signing_keys = check_signing_keys
        self.clients.open(port)

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        """Ids of the slaves' requests are odd, those of clients even."""
        try:
            if kind in NODE_KINDS:
                self._serve_node(kind, body, on_reply)
                return 0
            for_slaves = kind in REPLICATION_KINDS
            port = self.slaves if for_slaves else self.clients
            if not port.is_open:
                raise NotMaster(self.closed_reason)
            if kind in _STORING_KINDS:
                self.check_send_quorum()
            elif kind == Kind.ROTATE_KEYS and body != _READ_KEYS:
                self.check_signing_keys()
        except PopmqError as error:
            self.refused_by_code[error.code] = self.refused_by_code.get(error.code, 0) + 1
            on_reply(error)
            return 0
        return 2 * port.request(kind, body, timeout_ms, on_reply) + for_slaves

    def cancel(self, request_id: int) -> None:
        port = self.slaves if request_id & 1 else self.clients
        port.cancel(request_id >> 1)

    def client_request(self, request_id: int) -> int | None:
        """The id that the part for clients has for a request; None if that part did not get it."""
        return None if request_id & 1 else self.clients.own_id(request_id >> 1)
