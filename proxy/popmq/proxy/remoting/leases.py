"""LOCK_BATCH_MQ and UNLOCK_BATCH_MQ: consumers that process a queue in order hold it alone.

Each broker group keeps the leases of its own queues (broker/operations/queue_leases.py).  What
could not be asked is not locked.
"""

from collections.abc import Sequence

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.topics import check_group_name, is_broker_name
from popmq.common.wire.pull_pb2 import LeasedQueue, LeaseReply, LeaseRequest
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.remoting.request import Request, json_bytes
from popmq.proxy.remoting.sessions import checked_client_id
from popmq.proxy.rpc.convert import read_reply
from popmq.proxy.rpc.rpc import Answer

QUEUES_LIMIT = 10_000  # of one request
BROKERS_LIMIT = 100


class Leases:
    def __init__(self, brokers: BrokerPorts) -> None:
        self._brokers = brokers

    def lock(self, request: Request) -> None:
        _Fan(self._brokers, request, unlock=False).start()

    def unlock(self, request: Request) -> None:
        _Fan(self._brokers, request, unlock=True).start()


class _Fan:
    """One request, put to every broker group that it names queues of."""

    def __init__(self, brokers: BrokerPorts, request: Request, *, unlock: bool) -> None:
        self._brokers = brokers
        self._request = request
        self._unlock = unlock
        self._held: list[dict[str, object]] = []
        content = request.json_body()
        group = content.get("consumerGroup")
        self._group = group if isinstance(group, str) else ""
        check_group_name(self._group)
        self._client_id = checked_client_id(content.get("clientId"))
        self._queues = _by_broker(content.get("mqSet"))
        self._missing = len(self._queues)

    def start(self) -> None:
        if not self._queues:
            self._finish()
        for broker, queues in self._queues.items():
            self._ask(broker, queues)

    def _ask(self, broker: str, queues: Sequence[LeasedQueue]) -> None:
        asked = LeaseRequest(
            group=self._group, client_id=self._client_id, queues=queues, unlock=self._unlock
        )

        def answered(answer: Answer) -> None:
            if isinstance(answer, bytes):
                for queue in read_reply(LeaseReply, answer).queues:
                    self._held.append(
                        {
                            "topic": queue.topic,
                            "brokerName": broker,
                            "queueId": queue.queue_id,
                        }
                    )
            self._missing -= 1
            if not self._missing:
                self._finish()

        rpc = self._request.rpc
        try:
            port = self._brokers.port(broker)
        except PopmqError as error:
            answered(error)
            return
        body = asked.SerializeToString()
        rpc.send_request(port, Kind.LEASE, body, rpc.timeout_ms(), answered)

    def _finish(self) -> None:
        if self._unlock:
            self._request.ok()
        else:
            self._request.ok(body=json_bytes({"lockOKMQSet": self._held}))


def _by_broker(data: object) -> dict[str, list[LeasedQueue]]:
    """The queues of a request. Raises BAD_REQUEST for what are none, and for too many."""
    items = data if isinstance(data, list) else []
    if len(items) > QUEUES_LIMIT:
        raise Refused(
            Code.BAD_REQUEST, f"mqSet of {len(items)} queues is over the limit of {QUEUES_LIMIT}"
        )
    queues: dict[str, list[LeasedQueue]] = {}
    for item in items:
        fields = item if isinstance(item, dict) else {}
        topic, number = fields.get("topic"), fields.get("queueId")
        broker = fields.get("brokerName")
        named = isinstance(topic, str) and isinstance(broker, str) and is_broker_name(broker)
        if not (named and isinstance(number, int) and 0 <= number < 1 << 31):
            raise Refused(
                Code.BAD_REQUEST,
                f"a queue of mqSet needs topic, brokerName and queueId: {item!r:.200}",
            )
        queues.setdefault(str(broker), []).append(LeasedQueue(topic=str(topic), queue_id=number))
    if len(queues) > BROKERS_LIMIT:
        raise Refused(
            Code.BAD_REQUEST, f"mqSet names {len(queues)} broker groups, {BROKERS_LIMIT} may be"
        )
    return queues
