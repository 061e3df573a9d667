"""RecallFanOut: which broker groups a recall asks, when timers may have moved from group to group.

The group that the handle names is asked first.  It names those that took timers of it while it was
drained, and they are asked too, and so on; each group once.  When a named group is not known now,
every group is asked: if it was drained and removed, one of them has what it had.  If it is only
absent, none has, and the client has to try again.
"""

from collections.abc import Callable

from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import Kind, RecallResult
from popmq.common.record.recall_handle import RecallHandle
from popmq.common.topics import is_broker_name
from popmq.common.wire import admin_pb2
from popmq.proxy.brokers.broker_ports import BrokerPorts, reachable_first
from popmq.proxy.brokers.timer_replies import join_recall
from popmq.proxy.rpc.convert import read_reply
from popmq.proxy.rpc.rpc import Answer, Rpc

OnOutcome = Callable[[str], None]


class RecallFanOut:
    """One recall. `then` hears the outcome that counts most; an error is raised in the RPC."""

    def __init__(
        self, brokers: BrokerPorts, rpc: Rpc, handle: RecallHandle, then: OnOutcome
    ) -> None:
        self._brokers = brokers
        self._rpc = rpc
        self._handle = handle
        self._then = then
        self._body = admin_pb2.RecallRequest(
            topic=handle.topic, message_id=handle.message_id, due_ms=handle.due_ms
        ).SerializeToString()
        self._asked: set[str] = set()
        self._found = admin_pb2.RecallReply()
        self._error: PopmqError | None = None
        if not is_broker_name(handle.broker):
            raise Refused(
                Code.BAD_REQUEST,
                f"the recall handle names broker group {handle.broker[:100]!r}, and no group can "
                "have that name",
            )
        known = brokers.names()
        self._absent = handle.broker if known and handle.broker not in known else ""
        self._asks = list(known) if self._absent else [handle.broker]

    def start(self) -> None:
        self._ask_next()

    def _ask_next(self) -> None:
        asks = [
            broker
            for broker in reachable_first(self._brokers, self._asks)
            if broker not in self._asked
        ]
        if not asks:
            self._finish()
            return
        name = asks[0]
        self._asked.add(name)
        try:
            port = self._brokers.port(name)
        except PopmqError as error:
            self._heard(error)
        else:
            self._rpc.send_request(
                port, Kind.RECALL, self._body, self._rpc.timeout_ms(), self._heard
            )

    def _heard(self, answer: Answer) -> None:
        if isinstance(answer, PopmqError):
            self._error = self._error or answer
        else:
            reply = read_reply(admin_pb2.RecallReply, answer)
            join_recall(self._found, reply)
            self._asks += reply.moved_to
            known = self._brokers.names()
            absent = [broker for broker in reply.moved_to if broker not in known]
            if absent:
                self._absent = self._absent or absent[0]
                self._asks = [broker for broker in (*self._asks, *known) if broker in known]
        self._ask_next()

    def _finish(self) -> None:
        """Raises Unavailable when a group that did not answer may have the message."""
        outcome = self._found.outcome
        if outcome not in (RecallResult.DONE, RecallResult.ALREADY_VISIBLE):
            if self._error is not None:
                raise self._error
            if self._absent:
                raise Unavailable(
                    f"broker group {self._absent!r}, which may have message "
                    f"{self._handle.message_id}, is not among the controllers' routes now, and no "
                    "other group has it"
                )
        self._then(outcome)
