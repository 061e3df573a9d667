"""Gate: the one `Port` of a broker with replicas: clients while it leads, its slaves, its peers.

What arrives for a part that is not there (any more) is refused with NOT_MASTER: nothing was
done, and whoever asks looks for the master.
"""

from collections.abc import Callable

from popmq.common.errors import NotMaster, PopmqError
from popmq.common.protocol.messaging_payloads import Kind, OnReply, Port
from popmq.common.wire.admin_pb2 import RotateKeysRequest

REPLICATION_KINDS = frozenset(
    (Kind.HANDSHAKE, Kind.FETCH, Kind.ACKED, Kind.READ_SNAPSHOT, Kind.TIMER_CHECK_POINT)
)
_STORES = frozenset((Kind.PUT, Kind.TAKE_TIMERS))
NODE_KINDS = frozenset((Kind.HAND_OVER, Kind.DESCRIBE_ROLE))
_LOOK = RotateKeysRequest(look=True).SerializeToString()  # changes nothing
_LIVES = 1 << 48  # ids of one life lie between two multiples; nobody asks so often


class GatedPort:
    """To one part of the broker. Closed, it lets nothing in; who is inside may still leave."""

    def __init__(self) -> None:
        self._life = 0
        self._port: Port | None = None
        self._open = False

    def open(self, port: Port) -> None:
        """To that part from now on; requests of another one's life are over."""
        if port is not self._port:
            self._life += 1
            self._port = port
        self._open = True

    def close(self) -> None:
        self._open = False

    def detach(self) -> None:
        """The part is no more, nor are its requests."""
        self._port, self._open = None, False

    @property
    def is_open(self) -> bool:
        return self._open

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        assert self._port is not None
        # The id is made first: the part may close the door while it serves.
        life = self._life
        return life * _LIVES + self._port.request(kind, body, timeout_ms, on_reply)

    def cancel(self, request_id: int) -> None:
        life, number = divmod(request_id, _LIVES)
        if self._port is not None and life == self._life:
            self._port.cancel(number)

    def own_id(self, request_id: int) -> int | None:
        """The id that the part knows the request by; None if it was another part's."""
        life, number = divmod(request_id, _LIVES)
        return number if life == self._life else None


class Gate:
    """`clients` and `slaves` are closed while nobody is served; `serve_node` takes the rest.

    `closed_reason` says to the others why not.
    """

    def __init__(self, serve_node: Callable[[Kind, bytes, OnReply], None]) -> None:
        self._serve_node = serve_node
        self.clients = GatedPort()
        self.slaves = GatedPort()
        self.check_send_quorum: Callable[[], None] = lambda: None
        self.check_signing_keys: Callable[[], None] = lambda: None
        self.closed_reason = "this broker was not told to lead yet"
        self.refused_by_code: dict[int, int] = {}

    def open_clients(
        self,
        port: Port,
        check_send_quorum: Callable[[], None],
        check_signing_keys: Callable[[], None],
    ) -> None:
        """`check_send_quorum` raises for a send that could not be confirmed now, and
        `check_signing_keys` for another key that a slave would ignore."""
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
            door = self.slaves if for_slaves else self.clients
            if not door.is_open:
                raise NotMaster(self.closed_reason)
            if kind in _STORES:
                self.check_send_quorum()
            elif kind == Kind.ROTATE_KEYS and body != _LOOK:
                self.check_signing_keys()
        except PopmqError as error:
            self.refused_by_code[error.code] = self.refused_by_code.get(error.code, 0) + 1
            on_reply(error)
            return 0
        return 2 * door.request(kind, body, timeout_ms, on_reply) + for_slaves

    def cancel(self, request_id: int) -> None:
        door = self.slaves if request_id & 1 else self.clients
        door.cancel(request_id >> 1)

    def client_request(self, request_id: int) -> int | None:
        """The id of a client's request at the part that serves clients now."""
        return None if request_id & 1 else self.clients.own_id(request_id >> 1)
