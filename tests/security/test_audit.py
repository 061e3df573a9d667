"""The audit log: no administrative change without a line, whatever an attacker turns off before."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e.processes import LOCAL
from security.target import CLIENT, Target

from popmq.cli.client import Client
from popmq.common.errors import Code, PopmqError
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import admin_pb2 as api

pytestmark = pytest.mark.more

ADMIN_PORT = {"POPMQ_PROXY_ADMIN_LISTEN": f"{LOCAL}:0"}


def lines_of(target: Target) -> list[dict[str, Any]]:
    return [json.loads(line) for line in target.log_text().splitlines() if line[:1] == "{"]


def audited(target: Target) -> list[dict[str, Any]]:
    return [line for line in lines_of(target) if line["event"] == "administrative change"]


def change_log_level(target: Target, level: int) -> str:
    request = api.ChangeLogLevelRequest(level=api.ChangeLogLevelRequest.Level.ValueType(level))
    with grpc.insecure_channel(target.ready.admin) as channel:
        call: Any = channel.unary_unary("/apache.rocketmq.v2.Admin/ChangeLogLevel")
        answer = call(request.SerializeToString(), metadata=CLIENT, timeout=30)
    return str(api.ChangeLogLevelResponse.FromString(answer).remark)


def test_changes_after_the_log_level_was_turned_up_are_audited_and_so_is_that(
    tmp_path: Path,
) -> None:
    with Target(tmp_path, settings=ADMIN_PORT) as target:
        assert "ERROR" in change_log_level(target, 4)
        with Client(target.ready.endpoint) as tool:
            topic = admin.Topic(name="orders", queues=2)
            tool.call_admin(admin.CreateTopicRequest(topic=topic), admin.TopicReply)
            topic.queues = 4
            tool.call_admin(admin.AlterTopicRequest(topic=topic), admin.TopicReply)
            tool.call_admin(admin.DeleteTopicRequest(name="orders"), admin.TopicReply)
            group = admin.Group(name="readers")
            tool.call_admin(admin.CreateGroupRequest(group=group), admin.GroupReply)
            tool.call_admin(admin.DeleteGroupRequest(name="readers"), admin.GroupReply)
            with pytest.raises(PopmqError):
                tool.call_admin(admin.DeleteTopicRequest(name="nowhere"), admin.TopicReply)
            tool.call_admin(admin.ListTopicsRequest(), admin.ListTopicsReply)
        lines = audited(target)
    calls = [line["call"] for line in lines]
    assert calls == [
        *("ChangeLogLevel", "CreateTopic", "AlterTopic", "DeleteTopic"),
        *("CreateGroup", "DeleteGroup", "DeleteTopic"),
    ]
    level, created, altered, deleted, _, group_deleted, refused = lines
    assert level["client"] == "other"
    assert "ERROR and above, after INFO" in level["after"]
    assert created["resource"] == "topic=orders"
    assert json.loads(created["after"])["topic"]["queues"] == 2
    assert json.loads(altered["before"])["topic"]["queues"] == 2
    assert json.loads(altered["after"])["topic"]["queues"] == 4
    assert json.loads(deleted["before"])["topic"]["queues"] == 4
    assert json.loads(group_deleted["before"])["group"]["name"] == "readers"
    assert (refused["code"], refused["resource"]) == (Code.TOPIC_NOT_FOUND, "name=nowhere")
    assert "nowhere does not exist" in refused["why"]
    assert {line["code"] for line in lines[:-1]} == {Code.OK.value}
    assert all(line["address"].startswith("127.0.0.1:") for line in lines)
    assert all(line["time"] for line in lines)
