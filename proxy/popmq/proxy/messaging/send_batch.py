"""SendBatch: the results of one send, gathered from the broker groups that its messages went to."""

from collections.abc import Sequence

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import PutResult
from popmq.common.record.recall_handle import RecallHandle
from popmq.common.topics import TopicConfig
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.rpc.convert import SentMessage, send_entry, sent_ok, status
from popmq.proxy.rpc.rpc import Rpc
from popmq.proxy.rpc.validate import common_code


class SendBatch:
    """Gathers one result per message; the reply leaves with the last."""

    def __init__(self, rpc: Rpc, topic: TopicConfig, sent: Sequence[SentMessage]) -> None:
        self.rpc = rpc
        self.topic = topic
        self.sent = sent
        self._results: list[PutResult | None] = [None] * len(sent)
        self._handles = [""] * len(sent)
        self._missing = len(sent)

    def settle(self, index: int, result: PutResult | PopmqError, broker: str = "") -> None:
        """`broker` is the one that stored it."""
        if isinstance(result, PopmqError):
            result = PutResult(result.code, str(result))
        metrics = self.rpc.metrics
        if result.code == Code.OK:
            metrics.sends += 1
        else:
            metrics.refused[result.code] += 1
        self._results[index] = result
        if result.due_ms:
            message_id = self.sent[index].message_id
            handle = RecallHandle(self.topic.name, broker, result.due_ms, message_id)
            self._handles[index] = handle.encode()
        self._missing -= 1
        if not self._missing:
            results = [entry for entry in self._results if entry is not None]
            ids = [message.message_id for message in self.sent]
            self.rpc.reply(send_reply(results, ids, self._handles))


def send_reply(
    results: Sequence[PutResult], message_ids: Sequence[str], recall_handles: Sequence[str]
) -> bytes:
    if all(result.code == Code.OK for result in results):
        return sent_ok(results, message_ids, recall_handles)
    code = common_code([result.code for result in results])
    first = results[0]
    text = first.message if first.code == code else "messages had different results; see each entry"
    reply = service.SendMessageResponse(
        status=status(code, text or "OK"),
        entries=[
            send_entry(result, message_id, handle)
            for result, message_id, handle in zip(results, message_ids, recall_handles, strict=True)
        ],
    )
    return reply.SerializeToString()
