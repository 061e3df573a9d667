"""What consumers and operators ask that takes steps: payloads in, payloads out.

`JOBS` makes the job of each kind of request; `handlers/request_runner.py` runs it.
"""

from collections.abc import Callable

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.dead_letter_requests import ListDeadLettersJob, RedriveJob
from popmq.broker.handlers.explain_requests import explain_job
from popmq.broker.handlers.lag_requests import LagJob
from popmq.broker.handlers.pull_offset_requests import OFFSET_JOBS
from popmq.broker.handlers.report_requests import REPORT_JOBS
from popmq.broker.handlers.request_runner import Job
from popmq.broker.handlers.reset_requests import ResetJob
from popmq.broker.handlers.time_span_requests import TimeSpanJob
from popmq.broker.handlers.timer_requests import TIMER_JOBS
from popmq.broker.handlers.transaction_requests import end_transaction_job
from popmq.common.errors import PopmqError
from popmq.common.protocol.messaging_payloads import (
    AckRequest,
    AckResult,
    Kind,
    decode_ack,
    encode_ack_reply,
)
from popmq.common.wire import admin_pb2 as pb


class RejectJob:
    """Dead letters at once, by receipt handle; one result per handle, in order."""

    def __init__(self, broker: Broker, request: AckRequest) -> None:
        self._acks = broker.acks
        self._request = request
        self._results: list[AckResult] = []

    def step(self) -> bytes | None:
        request = self._request
        for handle in request.handles[len(self._results) :]:
            try:
                self._acks.reject(topic=request.topic, group=request.group, handle=handle)
                self._results.append(AckResult())
            except PopmqError as error:
                self._results.append(AckResult(error.code, str(error)))
        return encode_ack_reply(self._results)


def _reject(broker: Broker, body: bytes) -> Job:
    return RejectJob(broker, decode_ack(body))


def _reset_offset(broker: Broker, body: bytes) -> Job:
    return ResetJob(broker, pb.ResetOffsetRequest.FromString(body))


def _lag(broker: Broker, body: bytes) -> Job:
    return LagJob(broker, pb.LagRequest.FromString(body))


def _time_spans(broker: Broker, body: bytes) -> Job:
    return TimeSpanJob(broker, pb.TimeSpansRequest.FromString(body))


def _list_dead_letters(broker: Broker, body: bytes) -> Job:
    return ListDeadLettersJob(broker, pb.ListDeadLettersRequest.FromString(body))


def _redrive(broker: Broker, body: bytes) -> Job:
    return RedriveJob(broker, pb.RedriveRequest.FromString(body))


def _explain(broker: Broker, body: bytes) -> Job:
    return explain_job(broker, pb.ExplainRequest.FromString(body))


JOBS: dict[Kind, Callable[[Broker, bytes], Job]] = {
    Kind.REJECT: _reject,
    Kind.RESET_OFFSET: _reset_offset,
    Kind.EXPLAIN: _explain,
    Kind.LAG: _lag,
    Kind.TIME_SPANS: _time_spans,
    Kind.LIST_DEAD_LETTERS: _list_dead_letters,
    Kind.REDRIVE: _redrive,
    **TIMER_JOBS,
    **OFFSET_JOBS,
    **REPORT_JOBS,
    Kind.END_TRANSACTION: end_transaction_job,
}
