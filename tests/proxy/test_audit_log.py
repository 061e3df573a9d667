"""What of an administrative call is audited, and what is not."""

import logging
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass
from proxy.houses import house

from popmq.common.errors import Code
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.admin.audit_log import CHANGES, AuditLog
from popmq.proxy.api import admin_pb2 as api
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.transport.interface import Method, MethodType

# What the services have that changes nothing, or only the caller's own.
READS = {
    *("DescribeTopic", "ListTopics", "DescribeGroup", "ListGroups", "FindMessages", "Explain"),
    *("Lag", "TimeSpans", "ListDeadLetters", "ListTimers", "ForecastTimers", "ListBrokers"),
    *("DescribeSettings", "ListClients"),
    *("DescribeUser", "ListUsers", "CheckAccess"),
}


def audited(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.name == "popmq.audit"]


def test_every_call_of_the_admin_service_is_audited_or_known_to_read() -> None:
    (service,) = admin.DESCRIPTOR.services_by_name.values()
    for method in service.methods:
        path = f"/{service.full_name}/{method.name}"
        assert (path in CHANGES) != (method.name in READS), path
        if path in CHANGES:
            types = CHANGES[path].request.DESCRIPTOR, CHANGES[path].reply.DESCRIPTOR
            assert types == (method.input_type, method.output_type)
            assert GetMessageClass(method.input_type)


async def test_a_dry_run_is_not_audited_and_the_reset_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with house(tmp_path, "a") as at:
        await at.change_topic("CreateTopic", admin.Topic(name="orders", queues=1))
        for dry_run in (True, False):
            request = admin.ResetOffsetRequest(
                group="g", topic="orders", newest=True, dry_run=dry_run
            )
            await at.raw("ResetOffset", request.SerializeToString())
        reset = api.ResetGroupOffsetRequest(
            group=pb.Resource(name="g"), topic=pb.Resource(name="orders")
        )
        await at.raw("ResetGroupOffset", reset.SerializeToString())
        counted = at.proxy.metrics.admin_changes
    calls = [(record.call, record.resource) for record in audited(caplog)]
    assert calls == [
        ("CreateTopic", "topic=orders"),
        ("ResetOffset", "topic=orders group=g"),
        ("ResetGroupOffset", "topic=orders group=g"),
    ]
    assert counted == {"CreateTopic": 1, "ResetOffset": 1, "ResetGroupOffset": 1}


def test_a_client_that_leaves_before_the_answer_is_audited(
    make_call: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = "/popmq.admin.v1.Admin/DeleteTopic"
    method = Method(path, MethodType.UNARY, start=lambda call, data: None)
    (wrapped,) = AuditLog(StaticBrokers({}), ProxyMetrics()).audited([method])
    assert wrapped.start is not None
    call = make_call(metadata={"x-mq-client-id": "me@1"})
    wrapped.start(call, admin.DeleteTopicRequest(name="orders").SerializeToString())
    assert audited(caplog) == []
    call.leave()
    (record,) = audited(caplog)
    assert (record.call, record.resource, record.client) == ("DeleteTopic", "name=orders", "me@1")
    assert record.code == Code.REQUEST_TIMEOUT
    assert "perhaps it was done" in record.why


def test_no_level_of_the_loggers_above_turns_it_off(caplog: pytest.LogCaptureFixture) -> None:
    ours = logging.getLogger("popmq")
    before = ours.level
    try:
        ours.setLevel(logging.CRITICAL)
        assert logging.getLogger("popmq.audit").isEnabledFor(logging.INFO)
    finally:
        ours.setLevel(before)
