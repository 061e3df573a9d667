"""The slave's side of a light replica (`model/node.py`): agree, cut, fetch, ack."""

from functools import partial
from typing import TYPE_CHECKING

from popmq.broker.ha.epoch_file import consistent_point
from popmq.common.errors import PopmqError
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.protocol.replication_payloads import (
    Acked,
    Block,
    Fetch,
    Handshake,
    HandshakeReply,
    decode_acked_reply,
    decode_block,
    decode_handshake_reply,
    encode_acked,
    encode_fetch,
    encode_handshake,
)
from popmq.testing.cluster_world.port import SimPort
from popmq.testing.model.log import RECORD_SIZE

if TYPE_CHECKING:
    from popmq.testing.model.node import ModelNode

FETCH_RECORDS = 16
_FETCH_WAIT_MS = 200


class ModelSlave:
    """Follows one master in one epoch; a connection that is lost begins anew."""

    def __init__(self, node: "ModelNode", epoch: int, master: str, address: str) -> None:
        self._node = node
        self.epoch, self.master, self.address = epoch, master, address
        self.session = 0
        self.agreed = False  # with the master, up to where both logs are the same
        self._attempt = 0
        self._over = False
        self._port = SimPort(node.net, node.host, address, on_state=self._connected)

    def follows(self, epoch: int, address: str) -> bool:
        return (self.epoch, self.address) == (epoch, address)

    def stop(self) -> None:
        self._over = True
        self._port.close()

    def fsynced(self) -> None:
        self.ack(self.ack_position())

    def ack_position(self) -> int:
        return self._node.log.durable

    def ack(self, position: int) -> None:
        if not self.agreed or self._over:
            return
        body = encode_acked(Acked(self.epoch, self._node.identity.store_id, self.session, position))
        heard = partial(self._confirmed, self._attempt)
        self._port.request(Kind.ACKED, body, 1_000, heard)

    # -- inside

    def _connected(self, up: bool) -> None:
        self.agreed = False
        self._attempt += 1
        if up and not self._over:
            self._shake_hands()

    def _shake_hands(self) -> None:
        node = self._node
        asked = Handshake(self.epoch, node.identity.store_id, node.host.name, "", node.log.end, 0)
        agree = partial(self._agree, self._attempt)
        self._port.request(Kind.HANDSHAKE, encode_handshake(asked), 1_000, agree)

    def is_stale(self, attempt: int) -> bool:
        """R10: an answer to an older connection."""
        return attempt != self._attempt or self._over

    def _again(self) -> None:
        self.agreed = False
        self._attempt += 1
        attempt = self._attempt

        def again() -> None:
            if not self.is_stale(attempt) and self._port.connected:
                self._shake_hands()

        self._node.host.after(100, again)

    def _agree(self, attempt: int, answer: bytes | PopmqError) -> None:
        if self.is_stale(attempt):
            return
        if isinstance(answer, PopmqError):
            self._again()
            return
        reply = decode_handshake_reply(answer)
        if reply.epoch != self._node.identity.epoch:
            return
        self._node.cut_to(self.agreed_position(reply))
        self.session, self.agreed = reply.session, True
        self._fetch()

    def agreed_position(self, reply: HandshakeReply) -> int:
        """R21."""
        node = self._node
        point = consistent_point(node.epochs.entries, node.log.end, reply.entries, reply.end)
        return point or 0

    def _fetch(self) -> None:
        node = self._node
        asked = Fetch(
            self.epoch,
            node.identity.store_id,
            self.session,
            node.log.end,
            FETCH_RECORDS * RECORD_SIZE,
            node.confirmed,
            _FETCH_WAIT_MS,
        )
        body = encode_fetch(asked)
        self._port.request(Kind.FETCH, body, 1_500, partial(self._take, self._attempt))

    def _take(self, attempt: int, answer: bytes | PopmqError) -> None:
        if self.is_stale(attempt) or not self.agreed:
            return
        if isinstance(answer, PopmqError):
            self._again()
            return
        node, block = self._node, decode_block(answer)
        if block.epoch != node.identity.epoch or not self.position_fits(block):
            self._again()
            return
        if block.data:
            node.store_block(block)
        else:
            self.fsynced()
        node.know_confirmed(min(block.confirmed, node.log.end))
        self._fetch()

    def position_fits(self, block: Block) -> bool:
        """R23."""
        return block.position == self._node.log.end

    def _confirmed(self, attempt: int, answer: bytes | PopmqError) -> None:
        node = self._node
        if self.is_stale(attempt) or not self.agreed or isinstance(answer, PopmqError):
            return
        reply = decode_acked_reply(answer)
        if reply.epoch == node.identity.epoch:
            node.know_confirmed(min(reply.confirmed, node.log.end))
