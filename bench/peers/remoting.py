"""RocketMQ's own protocol, as far as a benchmark needs it: make a topic, ask for its offsets.

A frame is `| length u32 | kind u8, header length u24 | header (JSON) | body |`, the length without
itself (RocketMQ: RemotingCommand).
"""

import json
import socket
import struct
import time
from itertools import count
from typing import Any

from popmq.cli.load.reactor import LoadError

TIMEOUT_S = 10
REGISTERED_S = 60
UPDATE_TOPIC, GET_MAX_OFFSET, CLUSTER_INFO, UPDATE_GROUP = 17, 30, 106, 200
_NUMBERS = count(1)


def ask(
    port: int, code: int, fields: dict[str, str], body: bytes = b""
) -> tuple[dict[str, Any], bytes]:
    """The answer's extra fields and its body. LoadError when it is not a success."""
    header = json.dumps(
        {
            "code": code,
            "language": "JAVA",
            "version": 465,
            "opaque": next(_NUMBERS),
            "flag": 0,
            "extFields": fields,
            "serializeTypeCurrentRPC": "JSON",
        }
    ).encode()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
            size = 4 + len(header) + len(body)
            connection.sendall(struct.pack(">II", size, len(header)) + header + body)
            (size,) = struct.unpack(">I", _exactly(connection, 4))
            frame = _exactly(connection, size)
    except OSError as error:
        raise LoadError(f"RocketMQ on port {port}: {error}") from error
    end = 4 + (int.from_bytes(frame[:4]) & 0xFF_FFFF)
    answer = json.loads(frame[4:end])
    if answer["code"] != 0:
        raise LoadError(f"RocketMQ answered {answer['code']}: {answer.get('remark')}")
    return answer.get("extFields") or {}, frame[end:]


def wait_until_registered(names_port: int, broker: str) -> None:
    """Until the name server lists the broker: a proxy that starts earlier ends with an error."""
    until = time.monotonic() + REGISTERED_S
    while broker.encode() not in ask(names_port, CLUSTER_INFO, {})[1]:
        if time.monotonic() > until:
            raise LoadError(f"{broker} did not register within {REGISTERED_S} s")
        time.sleep(0.2)


def create_topic(port: int, name: str, queues: int, kind: str) -> None:
    fields = {
        "topic": name,
        "defaultTopic": "TBW102",
        "readQueueNums": str(queues),
        "writeQueueNums": str(queues),
        "perm": "6",
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
        "attributes": f"+message.type={kind}",
    }
    ask(port, UPDATE_TOPIC, fields)


def create_group(port: int, name: str) -> None:
    group = {
        "groupName": name,
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "consumeBroadcastEnable": True,
        "retryQueueNums": 1,
        "retryMaxTimes": 16,
        "brokerId": 0,
        "whichBrokerWhenConsumeSlowly": 1,
    }
    ask(port, UPDATE_GROUP, {}, json.dumps(group).encode())


def max_offset(port: int, topic: str, queue: int) -> int:
    fields, _ = ask(port, GET_MAX_OFFSET, {"topic": topic, "queueId": str(queue)})
    return int(fields["offset"])


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        data = connection.recv(size)
        if not data:
            raise OSError("the connection was closed")
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
