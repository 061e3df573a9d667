"""The public protocol keeps the numbers that RocketMQ 5 clients were compiled with.

The tables are written by hand from the published protocol and hold what a client cannot live
without; a number that moves here breaks every client that is out there.
"""

import pytest
from google.protobuf.descriptor import FieldDescriptor

from popmq.proxy.api import definition_pb2, service_pb2

FIELDS: dict[str, dict[str, int]] = {
    "Resource": {"resource_namespace": 1, "name": 2},
    "FilterExpression": {"type": 1, "expression": 2},
    "SubscriptionEntry": {"topic": 1, "expression": 2},
    "RetryPolicy": {"max_attempts": 1, "exponential_backoff": 2, "customized_backoff": 3},
    "ExponentialBackoff": {"initial": 1, "max": 2, "multiplier": 3},
    "CustomizedBackoff": {"next": 1},
    "Address": {"host": 1, "port": 2},
    "Endpoints": {"scheme": 1, "addresses": 2},
    "Broker": {"name": 1, "id": 2, "endpoints": 3},
    "MessageQueue": {
        "topic": 1,
        "id": 2,
        "permission": 3,
        "broker": 4,
        "accept_message_types": 5,
    },
    "Digest": {"type": 1, "checksum": 2},
    "SystemProperties": {
        "tag": 1,
        "keys": 2,
        "message_id": 3,
        "body_digest": 4,
        "body_encoding": 5,
        "message_type": 6,
        "born_timestamp": 7,
        "born_host": 8,
        "store_timestamp": 9,
        "store_host": 10,
        "delivery_timestamp": 11,
        "receipt_handle": 12,
        "queue_id": 13,
        "queue_offset": 14,
        "invisible_duration": 15,
        "delivery_attempt": 16,
        "message_group": 17,
        "trace_context": 18,
        "orphaned_transaction_recovery_duration": 19,
        "dead_letter_queue": 20,
        "lite_topic": 21,
        "priority": 22,
    },
    "Message": {"topic": 1, "user_properties": 2, "system_properties": 3, "body": 4},
    "Status": {"code": 1, "message": 2},
    "UA": {"language": 1, "version": 2, "platform": 3, "hostname": 4},
    "Settings": {
        "client_type": 1,
        "access_point": 2,
        "backoff_policy": 3,
        "request_timeout": 4,
        "publishing": 5,
        "subscription": 6,
        "user_agent": 7,
        "metric": 8,
        "client_properties": 9,
    },
    "Publishing": {"topics": 1, "max_body_size": 2, "validate_message_type": 3},
    "Subscription": {
        "group": 1,
        "subscriptions": 2,
        "fifo": 3,
        "receive_batch_size": 4,
        "long_polling_timeout": 5,
        "lite_subscription_quota": 6,
        "max_lite_topic_size": 7,
    },
    "Metric": {"on": 1, "endpoints": 2},
    "OffsetOption": {"policy": 1, "offset": 2, "tail_n": 3, "timestamp": 4},
    "QueryRouteRequest": {"topic": 1, "endpoints": 2},
    "QueryRouteResponse": {"status": 1, "message_queues": 2},
    "SendMessageRequest": {"messages": 1},
    "SendResultEntry": {
        "status": 1,
        "message_id": 2,
        "transaction_id": 3,
        "offset": 4,
        "recall_handle": 5,
    },
    "SendMessageResponse": {"status": 1, "entries": 2},
    "QueryAssignmentRequest": {"topic": 1, "group": 2, "endpoints": 3},
    "QueryAssignmentResponse": {"status": 1, "assignments": 2},
    "ReceiveMessageRequest": {
        "group": 1,
        "message_queue": 2,
        "filter_expression": 3,
        "batch_size": 4,
        "invisible_duration": 5,
        "auto_renew": 6,
        "long_polling_timeout": 7,
        "attempt_id": 8,
    },
    "ReceiveMessageResponse": {"status": 1, "message": 2, "delivery_timestamp": 3},
    "AckMessageEntry": {"message_id": 1, "receipt_handle": 2, "lite_topic": 3},
    "AckMessageRequest": {"group": 1, "topic": 2, "entries": 3},
    "AckMessageResultEntry": {"message_id": 1, "receipt_handle": 2, "status": 3},
    "AckMessageResponse": {"status": 1, "entries": 2},
    "ForwardMessageToDeadLetterQueueRequest": {
        "group": 1,
        "topic": 2,
        "receipt_handle": 3,
        "message_id": 4,
        "delivery_attempt": 5,
        "max_delivery_attempts": 6,
        "lite_topic": 7,
    },
    "HeartbeatRequest": {"group": 1, "client_type": 2},
    "HeartbeatResponse": {"status": 1},
    "EndTransactionRequest": {
        "topic": 1,
        "message_id": 2,
        "transaction_id": 3,
        "resolution": 4,
        "source": 5,
        "trace_context": 6,
    },
    "TelemetryCommand": {
        "status": 1,
        "settings": 2,
        "thread_stack_trace": 3,
        "verify_message_result": 4,
        "recover_orphaned_transaction_command": 5,
        "print_thread_stack_trace_command": 6,
        "verify_message_command": 7,
        "reconnect_endpoints_command": 8,
        "notify_unsubscribe_lite_command": 9,
    },
    "RecoverOrphanedTransactionCommand": {"message": 1, "transaction_id": 2},
    "ChangeInvisibleDurationRequest": {
        "group": 1,
        "topic": 2,
        "receipt_handle": 3,
        "invisible_duration": 4,
        "message_id": 5,
        "lite_topic": 6,
        "suspend": 7,
    },
    "ChangeInvisibleDurationResponse": {"status": 1, "receipt_handle": 2},
    "PullMessageRequest": {
        "group": 1,
        "message_queue": 2,
        "offset": 3,
        "batch_size": 4,
        "filter_expression": 5,
        "long_polling_timeout": 6,
    },
    "PullMessageResponse": {"status": 1, "message": 2, "next_offset": 3},
    "UpdateOffsetRequest": {"group": 1, "message_queue": 2, "offset": 3},
    "GetOffsetResponse": {"status": 1, "offset": 2},
    "QueryOffsetRequest": {"message_queue": 1, "query_offset_policy": 2, "timestamp": 3},
    "RecallMessageRequest": {"topic": 1, "recall_handle": 2},
    "RecallMessageResponse": {"status": 1, "message_id": 2},
    "SyncLiteSubscriptionRequest": {
        "action": 1,
        "topic": 2,
        "group": 3,
        "lite_topic_set": 4,
        "version": 5,
        "offset_option": 6,
    },
}

# Value names are checked as (name, number), so a dropped or an added one shows as well.
ENUMS: dict[str, dict[str, int]] = {
    "TransactionResolution": {
        "TRANSACTION_RESOLUTION_UNSPECIFIED": 0,
        "COMMIT": 1,
        "ROLLBACK": 2,
    },
    "Permission": {
        "PERMISSION_UNSPECIFIED": 0,
        "NONE": 1,
        "READ": 2,
        "WRITE": 3,
        "READ_WRITE": 4,
    },
    "FilterType": {"FILTER_TYPE_UNSPECIFIED": 0, "TAG": 1, "SQL": 2},
    "AddressScheme": {"ADDRESS_SCHEME_UNSPECIFIED": 0, "IPv4": 1, "IPv6": 2, "DOMAIN_NAME": 3},
    "MessageType": {
        "MESSAGE_TYPE_UNSPECIFIED": 0,
        "NORMAL": 1,
        "FIFO": 2,
        "DELAY": 3,
        "TRANSACTION": 4,
        "LITE": 5,
        "PRIORITY": 6,
    },
    "DigestType": {"DIGEST_TYPE_UNSPECIFIED": 0, "CRC32": 1, "MD5": 2, "SHA1": 3},
    "ClientType": {
        "CLIENT_TYPE_UNSPECIFIED": 0,
        "PRODUCER": 1,
        "PUSH_CONSUMER": 2,
        "SIMPLE_CONSUMER": 3,
        "PULL_CONSUMER": 4,
        "LITE_PUSH_CONSUMER": 5,
        "LITE_SIMPLE_CONSUMER": 6,
    },
    "Encoding": {"ENCODING_UNSPECIFIED": 0, "IDENTITY": 1, "GZIP": 2},
    "QueryOffsetPolicy": {"BEGINNING": 0, "END": 1, "TIMESTAMP": 2},
}

CODES: dict[str, int] = {
    "OK": 20000,
    "MULTIPLE_RESULTS": 30000,
    "BAD_REQUEST": 40000,
    "ILLEGAL_TOPIC": 40002,
    "ILLEGAL_CONSUMER_GROUP": 40003,
    "ILLEGAL_INVISIBLE_TIME": 40011,
    "ILLEGAL_DELIVERY_TIME": 40012,
    "INVALID_RECEIPT_HANDLE": 40013,
    "MESSAGE_PROPERTY_CONFLICT_WITH_TYPE": 40014,
    "ILLEGAL_POLLING_TIME": 40018,
    "UNAUTHORIZED": 40100,
    "FORBIDDEN": 40300,
    "MESSAGE_NOT_FOUND": 40401,
    "TOPIC_NOT_FOUND": 40402,
    "CONSUMER_GROUP_NOT_FOUND": 40403,
    "REQUEST_TIMEOUT": 40800,
    "MESSAGE_BODY_TOO_LARGE": 41301,
    "MESSAGE_BODY_EMPTY": 41302,
    "TOO_MANY_REQUESTS": 42900,
    "MESSAGE_PROPERTIES_TOO_LARGE": 43101,
    "INTERNAL_SERVER_ERROR": 50001,
    "HA_NOT_AVAILABLE": 50002,
    "NOT_IMPLEMENTED": 50100,
    "PROXY_TIMEOUT": 50400,
    "MASTER_PERSISTENCE_TIMEOUT": 50401,
    "UNSUPPORTED": 50500,
    "FAILED_TO_CONSUME_MESSAGE": 60000,
}

# Clients tell "absent" from zero in these.
WITH_PRESENCE: dict[str, set[str]] = {
    "SystemProperties": {"tag", "receipt_handle", "delivery_attempt", "message_group", "priority"},
    "Subscription": {"fifo", "receive_batch_size"},
    "Settings": {"client_type"},
    "ReceiveMessageRequest": {"attempt_id"},
    "ChangeInvisibleDurationRequest": {"suspend"},
    "SyncLiteSubscriptionRequest": {"version"},
}

ONEOFS: dict[tuple[str, str], set[str]] = {
    ("RetryPolicy", "strategy"): {"exponential_backoff", "customized_backoff"},
    ("Settings", "pub_sub"): {"publishing", "subscription"},
    ("ReceiveMessageResponse", "content"): {"status", "message", "delivery_timestamp"},
    ("PullMessageResponse", "content"): {"status", "message", "next_offset"},
    ("OffsetOption", "offset_type"): {"policy", "offset", "tail_n", "timestamp"},
}

UNARY, REPLIES_STREAM, BOTH_STREAM = (False, False), (False, True), (True, True)

METHODS: dict[str, tuple[bool, bool]] = {
    "QueryRoute": UNARY,
    "Heartbeat": UNARY,
    "SendMessage": UNARY,
    "QueryAssignment": UNARY,
    "ReceiveMessage": REPLIES_STREAM,
    "AckMessage": UNARY,
    "ForwardMessageToDeadLetterQueue": UNARY,
    "PullMessage": REPLIES_STREAM,
    "UpdateOffset": UNARY,
    "GetOffset": UNARY,
    "QueryOffset": UNARY,
    "EndTransaction": UNARY,
    "Telemetry": BOTH_STREAM,
    "NotifyClientTermination": UNARY,
    "ChangeInvisibleDuration": UNARY,
    "RecallMessage": UNARY,
    "SyncLiteSubscription": UNARY,
}


def fields_of(message: str) -> dict[str, FieldDescriptor]:
    for file in (definition_pb2.DESCRIPTOR, service_pb2.DESCRIPTOR):
        if message in file.message_types_by_name:
            return dict(file.message_types_by_name[message].fields_by_name)
    raise AssertionError(f"no message {message} in the public protocol")


@pytest.mark.parametrize("message", FIELDS)
def test_fields_have_their_published_numbers(message: str) -> None:
    assert {name: field.number for name, field in fields_of(message).items()} == FIELDS[message]


@pytest.mark.parametrize("enum", ENUMS)
def test_enum_values_have_their_published_numbers(enum: str) -> None:
    values = definition_pb2.DESCRIPTOR.enum_types_by_name[enum].values
    assert {value.name: value.number for value in values} == ENUMS[enum]


def test_status_codes_have_their_published_numbers() -> None:
    assert {name: definition_pb2.Code.Value(name) for name in CODES} == CODES


@pytest.mark.parametrize("message", WITH_PRESENCE)
def test_optional_fields_can_be_told_from_zero(message: str) -> None:
    fields = fields_of(message)
    assert {name for name in WITH_PRESENCE[message] if fields[name].has_presence} == (
        WITH_PRESENCE[message]
    )


@pytest.mark.parametrize(("message", "oneof"), ONEOFS)
def test_alternatives_exclude_each_other(message: str, oneof: str) -> None:
    members = {
        name
        for name, field in fields_of(message).items()
        if field.containing_oneof is not None and field.containing_oneof.name == oneof
    }
    assert members == ONEOFS[message, oneof]


def test_the_service_has_each_method_with_its_way_of_streaming() -> None:
    methods = service_pb2.DESCRIPTOR.services_by_name["MessagingService"].methods
    assert {m.name: (m.client_streaming, m.server_streaming) for m in methods} == METHODS


def test_requests_and_replies_are_named_after_their_method() -> None:
    methods = service_pb2.DESCRIPTOR.services_by_name["MessagingService"].methods
    for method in methods:
        names = (method.input_type.name, method.output_type.name)
        if method.name == "Telemetry":
            assert names == ("TelemetryCommand", "TelemetryCommand")
        else:
            assert names == (f"{method.name}Request", f"{method.name}Response")


def test_a_send_request_has_the_bytes_a_client_would_write() -> None:
    request = service_pb2.SendMessageRequest()
    message = request.messages.add()
    message.topic.name = "t"
    message.body = b"hi"
    message.system_properties.message_id = "m"
    message.system_properties.delivery_attempt = 2
    # 0a = field 1, length-delimited; the attempt is field 16, so its tag takes two bytes.
    expected = bytes.fromhex("0a11 0a03 120174 1a06 1a016d 800102 22026869")
    assert request.SerializeToString(deterministic=True) == expected
