"""QUERY_ASSIGNMENT (400) and SET_MESSAGE_REQUEST_MODE (401): balancing by the server.

A consumer that leaves balancing to the server (`setClientRebalance(false)`) pops: from each broker
group, whatever the queue is, so there is nothing to balance.  Only its retry topic is pulled, by a
share of the members.  An answer other than success would make the client pull for good.
"""

from collections.abc import Sequence

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.topics import check_group_name, check_readable_topic_name, group_of_pull_retry
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.remoting.members import GroupMembership
from popmq.proxy.remoting.request import Request, json_bytes

_ANY_QUEUE = -1
_BY_CIRCLE = "AVG_BY_CIRCLE"


class Assignments:
    def __init__(
        self, brokers: BrokerPorts, routes: MetadataCache, membership: GroupMembership
    ) -> None:
        self._brokers = brokers
        self._routes = routes
        self._membership = membership

    def query(self, request: Request) -> None:
        content = request.json_body()
        topic, group = str(content.get("topic", "")), str(content.get("consumerGroup", ""))
        check_group_name(group)
        names = self._brokers.names()
        if content.get("messageModel") == "BROADCASTING":
            raise Refused(Code.BAD_REQUEST, "a broadcasting consumer reads all queues by itself")
        if group_of_pull_retry(topic):
            queues = self._retry_queues(request, group, str(content.get("strategyName", "AVG")))
            assigned = (
                None if queues is None else [_entry(topic, name, 0, "PULL") for name in queues]
            )
        else:
            check_readable_topic_name(topic)
            assigned = [_entry(topic, name, _ANY_QUEUE, "POP") for name in names] or None
        request.ok(body=json_bytes({"messageQueueAssignments": assigned}))

    def set_mode(self, request: Request) -> None:
        """Such consumers always pop; a group that is to pull has to balance by itself."""
        content = request.json_body()
        topic, group = str(content.get("topic", "")), str(content.get("consumerGroup", ""))
        mode = content.get("mode")
        check_group_name(group)
        if group_of_pull_retry(topic):
            raise Refused(Code.FORBIDDEN, f"{topic} is always pulled")
        check_readable_topic_name(topic)
        if mode != "POP":
            raise Refused(
                Code.NOT_IMPLEMENTED,
                f"mode {str(mode)[:40]!r}: consumers that leave balancing to the server pop; to "
                "pull, let them balance by themselves (setClientRebalance(true))",
            )
        self._routes.topic(topic, request.rpc.guard(lambda _: request.ok()))

    def _retry_queues(self, request: Request, group: str, strategy: str) -> Sequence[str] | None:
        """The broker groups whose queue of the retry topic this client pulls; None: those that it
        has, because the members are not known for sure."""
        client_id = request.connection.client_id
        try:
            members = self._membership.members(group, client_id)
        except PopmqError:
            return None
        return share(self._brokers.names(), members.index(client_id), len(members), strategy)


def share(queues: Sequence[str], index: int, members: int, strategy: str) -> Sequence[str]:
    """As a client would by that strategy: consecutive ones (AVG), or each n-th."""
    if strategy == _BY_CIRCLE:
        return queues[index::members]
    size, more = divmod(len(queues), members)
    start = index * size + min(index, more)
    return queues[start : start + size + (index < more)]


def _entry(topic: str, broker: str, queue: int, mode: str) -> dict[str, object]:
    place = {"topic": topic, "brokerName": broker, "queueId": queue}
    return {"messageQueue": place, "mode": mode, "attachments": None}
