"""END_TRANSACTION, and CHECK_TRANSACTION_STATE to producers by their group.

A transaction id names its broker group, so a commit or rollback is good at any proxy.  A producer
answers a check only if it is of the group that sent the half message, so brokers name checks by
group (broker/transaction/check_service.py).
"""

from collections import OrderedDict
from collections.abc import Iterable

from popmq.common.record.transaction_id import broker_of_transaction
from popmq.common.settings.settings import Settings
from popmq.common.wire.pull_pb2 import PulledMessage
from popmq.common.wire.transaction_pb2 import Check, EndTransactionRequest
from popmq.proxy.messaging.publishers import PublishRights
from popmq.proxy.messaging.transaction import EndTransaction
from popmq.proxy.remoting.connection import RemotingConnection
from popmq.proxy.remoting.frames import ONE_WAY
from popmq.proxy.remoting.message_conversion import stored_form
from popmq.proxy.remoting.request import Request
from popmq.proxy.remoting.request_codes import RequestCode
from popmq.proxy.remoting.routes import Addresses
from popmq.proxy.remoting.stored_message import encode_stored, offset_message_id

_COMMIT, _ROLLBACK = 8, 12


class Producers:
    """Implements `ProducerGroups`: which producers are at which connection."""

    def __init__(self, settings: Settings, addresses: Addresses, rights: PublishRights) -> None:
        self._settings = settings
        self._rights = rights
        self._addresses = addresses
        # By group, the connection that was asked last at the end.
        self._connections: dict[str, OrderedDict[RemotingConnection, None]] = {}
        self._of: dict[RemotingConnection, frozenset[str]] = {}
        self._users: dict[RemotingConnection, str] = {}  # that named the groups, if there are users
        self._groups: frozenset[str] | None = None

    def replace(
        self, connection: RemotingConnection, groups: Iterable[str], user: str = ""
    ) -> None:
        """The producers of that connection are of these groups and no others."""
        before, now = self._of.pop(connection, frozenset()), frozenset(groups)
        self._users.pop(connection, None)
        if now:
            self._of[connection], self._users[connection] = now, user
        for group in now - before:
            self._connections.setdefault(group, OrderedDict())[connection] = None
            self._groups = None
        for group in before - now:
            del self._connections[group][connection]
            if not self._connections[group]:
                del self._connections[group]
                self._groups = None

    def remove(self, connection: RemotingConnection, group: str) -> None:
        left = self._of.get(connection, frozenset()) - {group}
        self.replace(connection, left, self._users.get(connection, ""))

    def groups(self) -> frozenset[str]:
        if self._groups is None:
            self._groups = frozenset(self._connections)
        return self._groups

    def send_check(self, broker: str, check: Check) -> bool:
        connections = self._connections.get(check.producer_group, OrderedDict())
        connection = next((c for c in connections if self._may_see(c, check.topic)), None)
        if connection is None:
            return False
        connections.move_to_end(connection)
        host = self._addresses.of(connection)
        form = stored_form(
            PulledMessage(
                position=check.half_offset,
                queue_offset=check.half_offset,
                stored_ms=check.stored_ms,
                attempt=1,
                head=check.head,
                properties=check.properties,
            ),
            check.queue_id,
            store_host=host,
            cluster=self._settings.cluster.name,
            body_limit=self._settings.lean.max_inflated_bytes,
        )
        # Go 2.1.2 takes the id from there and not from the header.
        form = form._replace(
            properties={**form.properties, "__transactionId__": check.transaction_id}
        )
        fields = {
            "topic": check.topic,
            "tranStateTableOffset": str(check.half_offset),
            "commitLogOffset": str(check.half_offset),
            "msgId": form.properties["UNIQ_KEY"],
            "transactionId": check.transaction_id,
            "offsetMsgId": offset_message_id(host, check.half_offset),
            "bname": broker,
        }
        code = RequestCode.CHECK_TRANSACTION_STATE
        connection.request(code, fields, encode_stored(form), flag=ONE_WAY)
        return True

    def _may_see(self, connection: RemotingConnection, topic: str) -> bool:
        """A client names its group freely, so that gives no right to the group's half messages."""
        return self._rights.may_publish(self._users[connection], topic, connection.peer)


def end(transactions: EndTransaction, request: Request) -> None:
    """END_TRANSACTION, which is one-way from most clients: they ask for no answer and learn of a
    refusal by nothing but the next check."""
    ending = request.number("commitOrRollback", bits=32)
    broker = broker_of_transaction(request.text("transactionId", ""))
    if ending not in (_COMMIT, _ROLLBACK):
        request.ok()  # its producer does not know yet: it is asked again
        return
    asked = EndTransactionRequest(
        topic=request.text("topic", ""),
        transaction_id=request.text("transactionId"),
        commit=ending == _COMMIT,
    )
    transactions.end(request.rpc, broker, asked, request.ok)
