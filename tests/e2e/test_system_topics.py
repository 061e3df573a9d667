"""`popmq message show` on the system topics of a real `popmq up`."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from e2e.many import Up
from e2e.processes import RoleFailed

pytestmark = pytest.mark.more


def shown(up: Up, topic: str, *arguments: str) -> list[dict[str, object]]:
    printed = up.popmq("message", "show", "--json", "--topic", topic, *arguments)
    return [json.loads(line) for line in printed.splitlines()]


def test_system_topics_can_be_read_and_others_are_refused_in_words(tmp_path: Path) -> None:
    with Up(tmp_path, {}) as up:
        up.create(topic="orders", groups=["g"])
        up.popmq("send", "orders", "now")
        up.popmq("recv", "orders", "--group", "g", "--ack")
        up.popmq("topic", "create", "later", "--type", "delay")
        delayed = json.loads(up.popmq("send", "later", "then", "--delay", "1h", "--json"))

        meta = shown(up, "rmq_sys_meta", "--queue", "0", "--offset", "0", "--limit", "64")
        fields = [manifest["fields"] for manifest in meta]
        names = [field["topic"]["name"] for field in fields if "topic" in field]  # type: ignore[operator,index]
        assert {"orders", "later"} <= set(names)
        assert {"record": "META", "receipt_key": "not shown"} in fields
        since = shown(up, "rmq_sys_meta", "--queue", "0", "--time", str(meta[-1]["stored_ms"]))
        assert since[0]["stored_ms"] == meta[-1]["stored_ms"]

        revive = []
        for queue in range(8):
            with suppress(RoleFailed):  # most of its queues hold nothing
                revive += shown(
                    up,
                    "rmq_sys_REVIVE_LOG_popmq",
                    "--queue",
                    str(queue),
                    "--offset",
                    "0",
                    "--limit",
                    "64",
                )
        kinds = [manifest["fields"]["kind"] for manifest in revive]  # type: ignore[index]
        assert sorted(kinds) == ["ack", "check_point"]

        (timer,) = shown(up, "rmq_sys_wheel_timer", str(delayed["message_id"]))
        assert timer["body"] == "then"
        lines = up.popmq("message", "show", "--topic", "rmq_sys_meta", "--queue", "0", "--offset=0")
        assert "topic=rmq_sys_meta broker=" in lines

        for topic, arguments, words in (
            ("rmq_sys_nothing", ("--queue=0", "--offset=0"), "there are RMQ_SYS_TRANS_HALF_TOPIC"),
            ("rmq_sys_meta", ("some-id",), "have neither id nor key"),
            ("rmq_sys_meta", ("--key", "k"), "have neither id nor key"),
            ("rmq_sys_meta", ("--queue=1", "--offset=0"), "name one of its 1"),
            ("rmq_sys_meta", ("--queue=0", "--offset=9999"), "the queue holds 0 to"),
            ("rmq_sys_offsets", ("--queue=0", "--offset=0"), "the queue holds nothing"),
        ):
            with pytest.raises(RoleFailed, match=words):
                shown(up, topic, *arguments)
        for command in (("topic", "show", "rmq_sys_meta"), ("topic", "delete", "rmq_sys_meta")):
            with pytest.raises(RoleFailed) as refused_command:
                up.popmq(*command)
            assert "popmq topic create" not in str(refused_command.value)
