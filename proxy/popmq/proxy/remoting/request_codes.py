"""Every request code of RocketMQ 5.5.0, and what popmq says about it
(docs/reference/remoting.md).

The text of a code that is served is a note for the page.  That of another one is what a refusal
and the page name instead.
"""

from enum import Enum, IntEnum
from typing import Self


class Direction(Enum):
    """Which side sends a request; the value is why a request of the other directions is refused."""

    TO_SERVER = ""
    TO_CLIENT = "a server sends it to its clients"
    BETWEEN_SERVERS = "RocketMQ's servers send it to each other; those of popmq use other requests"
    UNUSED = "the clients and tools of RocketMQ 5.5.0 never send it"


_TO_SERVER, _TO_CLIENT = Direction.TO_SERVER, Direction.TO_CLIENT
_SERVERS, _UNUSED = Direction.BETWEEN_SERVERS, Direction.UNUSED

_CLEAN = "retention deletes what is old, see popmq config explain store.retention_hours"
_CLIENTS = "use popmq clients"
_COLD = "popmq has no such limit, see popmq config for its settings"
_GROUP_CHANGE = "use popmq group create or popmq group alter"
_LAG = "use popmq lag"
_LITE = "lite topics are served over gRPC only"
_LITE_LAG = "lite topics are served over gRPC only: use popmq lag"
_NAMES = "popmq has no name server and no values for it"
_REPLICAS = "use popmq broker list"
_ROCKSDB = "popmq has no RocksDB"
_SETTINGS = "use popmq config"
_SET = "a process reads its settings when it starts, see popmq config explain"
_TOPICS = "use popmq topic list"
_TOPIC_CHANGE = "use popmq topic create or popmq topic alter"


class RequestCode(IntEnum):
    text: str
    direction: Direction

    def __new__(cls, number: int, text: str = "", direction: Direction = _TO_SERVER) -> Self:
        code = int.__new__(cls, number)
        code._value_ = number
        code.text = text or direction.value
        code.direction = direction
        return code

    SEND_MESSAGE = 10, "also one-way, delayed, into a named queue"
    PULL_MESSAGE = 11, "held until there is a message"
    QUERY_MESSAGE = 12, "by key and by message id, over all broker groups"
    QUERY_BROKER_OFFSET = 13, "", _UNUSED
    QUERY_CONSUMER_OFFSET = 14, ""
    UPDATE_CONSUMER_OFFSET = 15, "also one-way"
    UPDATE_AND_CREATE_TOPIC = 17, _TOPIC_CHANGE
    UPDATE_AND_CREATE_TOPIC_LIST = 18, _TOPIC_CHANGE
    GET_ALL_TOPIC_CONFIG = 21, _TOPICS
    GET_TOPIC_CONFIG_LIST = 22, "", _UNUSED
    GET_TOPIC_NAME_LIST = 23, "", _UNUSED
    UPDATE_BROKER_CONFIG = 25, _SET
    GET_BROKER_CONFIG = 26, _SETTINGS
    TRIGGER_DELETE_FILES = 27, "", _UNUSED
    GET_BROKER_RUNTIME_INFO = 28, "use popmq top, or the metrics of the broker"
    SEARCH_OFFSET_BY_TIMESTAMP = 29, ""
    GET_MAX_OFFSET = 30, "the end of a queue"
    GET_MIN_OFFSET = 31, "the oldest message of a queue"
    GET_EARLIEST_MSG_STORETIME = 32, "the time of the oldest message"
    VIEW_MESSAGE_BY_ID = 33, "of messages that were pulled"
    HEART_BEAT = 34, "of both versions; V2 is not announced, so each heartbeat is complete"
    UNREGISTER_CLIENT = 35, ""
    CONSUMER_SEND_MSG_BACK = 36, "a client's own send to `%RETRY%<group>` is served too"
    END_TRANSACTION = 37, "also one-way, at any proxy"
    GET_CONSUMER_LIST_BY_GROUP = 38, "the members of a group"
    CHECK_TRANSACTION_STATE = 39, "the check of a half message", _TO_CLIENT
    NOTIFY_CONSUMER_IDS_CHANGED = 40, "the members of a group have changed", _TO_CLIENT
    LOCK_BATCH_MQ = 41, "of orderly consumers"
    UNLOCK_BATCH_MQ = 42, "of orderly consumers"
    GET_ALL_CONSUMER_OFFSET = 43, "", _SERVERS
    GET_ALL_DELAY_OFFSET = 45, "", _SERVERS
    CHECK_CLIENT_CONFIG = 46, "a wrong filter stops the consumer's start"
    GET_CLIENT_CONFIG = 47, "", _UNUSED
    GET_TIMER_CHECK_POINT = 60, "", _SERVERS
    GET_TIMER_METRICS = 61, "", _SERVERS
    PUT_KV_CONFIG = 100, _NAMES
    GET_KV_CONFIG = 101, _NAMES
    DELETE_KV_CONFIG = 102, _NAMES
    REGISTER_BROKER = 103, "", _SERVERS
    UNREGISTER_BROKER = 104, "", _SERVERS
    GET_ROUTEINFO_BY_TOPIC = 105, ""
    GET_BROKER_CLUSTER_INFO = 106, _REPLICAS
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200, _GROUP_CHANGE
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201, "use popmq group list"
    GET_TOPIC_STATS_INFO = 202, "use popmq lag, or popmq message show for messages of a queue"
    GET_CONSUMER_CONNECTION_LIST = 203, _CLIENTS
    GET_PRODUCER_CONNECTION_LIST = 204, _CLIENTS
    WIPE_WRITE_PERM_OF_BROKER = 205, "use popmq drain"
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206, _TOPICS
    DELETE_SUBSCRIPTIONGROUP = 207, "use popmq group delete"
    GET_CONSUME_STATS = 208, _LAG
    SUSPEND_CONSUMER = 209, "", _UNUSED
    RESUME_CONSUMER = 210, "", _UNUSED
    RESET_CONSUMER_OFFSET_IN_CONSUMER = 211, "", _UNUSED
    RESET_CONSUMER_OFFSET_IN_BROKER = 212, "", _UNUSED
    ADJUST_CONSUMER_THREAD_POOL = 213, "", _UNUSED
    WHO_CONSUME_THE_MESSAGE = 214, "", _UNUSED
    DELETE_TOPIC_IN_BROKER = 215, "use popmq topic delete"
    DELETE_TOPIC_IN_NAMESRV = 216, "use popmq topic delete"
    REGISTER_TOPIC_IN_NAMESRV = 217, "", _SERVERS
    GET_KVLIST_BY_NAMESPACE = 219, _NAMES
    RESET_CONSUMER_CLIENT_OFFSET = 220, "", _TO_CLIENT
    GET_CONSUMER_STATUS_FROM_CLIENT = 221, "", _TO_CLIENT
    INVOKE_BROKER_TO_RESET_OFFSET = 222, "use popmq reset-offset"
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS = 223, _LAG
    GET_TOPICS_BY_CLUSTER = 224, _TOPICS
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST = 225, _GROUP_CHANGE
    QUERY_TOPIC_CONSUME_BY_WHO = 300, _LAG
    REGISTER_FILTER_SERVER = 301, "", _UNUSED
    REGISTER_MESSAGE_FILTER_CLASS = 302, "", _UNUSED
    QUERY_CONSUME_TIME_SPAN = 303, _LAG
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304, "use popmq topic list --system"
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305, "use popmq topic list --system"
    CLEAN_EXPIRED_CONSUMEQUEUE = 306, _CLEAN
    GET_CONSUMER_RUNNING_INFO = 307, "from the client itself, at any proxy"
    QUERY_CORRECTION_OFFSET = 308, _LAG
    CONSUME_MESSAGE_DIRECTLY = 309, "use popmq dlq redrive to deliver a dead letter again"
    SEND_MESSAGE_V2 = 310, "as SEND_MESSAGE"
    GET_UNIT_TOPIC_LIST = 311, _TOPICS
    GET_HAS_UNIT_SUB_TOPIC_LIST = 312, _TOPICS
    GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST = 313, _TOPICS
    CLONE_GROUP_OFFSET = 314, "use popmq reset-offset for each group"
    VIEW_BROKER_STATS_DATA = 315, "use popmq top, or the metrics of the broker"
    CLEAN_UNUSED_TOPIC = 316, "use popmq topic delete"
    GET_BROKER_CONSUME_STATS = 317, _LAG
    UPDATE_NAMESRV_CONFIG = 318, _SET
    GET_NAMESRV_CONFIG = 319, _SETTINGS
    SEND_BATCH_MESSAGE = 320, "one queue, in order"
    QUERY_CONSUME_QUEUE = 321, "use popmq message show"
    QUERY_DATA_VERSION = 322, "", _SERVERS
    RESUME_CHECK_HALF_MESSAGE = 323, "use popmq explain for the state of a half message"
    SEND_REPLY_MESSAGE = 324, "across proxies"
    SEND_REPLY_MESSAGE_V2 = 325, "across proxies"
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326, "the reply, to the client that waits for it", _TO_CLIENT
    ADD_WRITE_PERM_OF_BROKER = 327, "use popmq drain --undo"
    GET_ALL_PRODUCER_INFO = 328, _CLIENTS
    DELETE_EXPIRED_COMMITLOG = 329, _CLEAN
    QUERY_TOPICS_BY_CONSUMER = 343, _LAG
    QUERY_SUBSCRIPTION_BY_CONSUMER = 345, _CLIENTS
    GET_TOPIC_CONFIG = 351, "use popmq topic show"
    GET_SUBSCRIPTIONGROUP_CONFIG = 352, "use popmq group show"
    UPDATE_AND_GET_GROUP_FORBIDDEN = 353, "use popmq user grant"
    CHECK_ROCKSDB_CQ_WRITE_PROGRESS = 354, _ROCKSDB
    EXPORT_ROCKSDB_CONFIG_TO_JSON = 355, _ROCKSDB
    LITE_PULL_MESSAGE = 361, "held until there is a message"
    RECALL_MESSAGE = 370, ""
    QUERY_ASSIGNMENT = 400, "balancing by the server: always pop"
    SET_MESSAGE_REQUEST_MODE = 401, "to pop only"
    GET_ALL_MESSAGE_REQUEST_MODE = 402, "", _SERVERS
    UPDATE_AND_CREATE_STATIC_TOPIC = 513, _TOPIC_CHANGE
    GET_BROKER_MEMBER_GROUP = 901, "", _SERVERS
    ADD_BROKER = 902, "use popmq broker to start a broker"
    REMOVE_BROKER = 903, "use popmq drain"
    BROKER_HEARTBEAT = 904, "", _SERVERS
    NOTIFY_MIN_BROKER_ID_CHANGE = 905, "", _SERVERS
    EXCHANGE_BROKER_HA_INFO = 906, "", _SERVERS
    GET_BROKER_HA_STATUS = 907, _REPLICAS
    RESET_MASTER_FLUSH_OFFSET = 908, _REPLICAS
    CONTROLLER_ALTER_SYNC_STATE_SET = 1001, "", _SERVERS
    CONTROLLER_ELECT_MASTER = 1002, "use popmq failover"
    CONTROLLER_REGISTER_BROKER = 1003, "", _SERVERS
    CONTROLLER_GET_REPLICA_INFO = 1004, "", _SERVERS
    CONTROLLER_GET_METADATA_INFO = 1005, "use popmq status"
    CONTROLLER_GET_SYNC_STATE_DATA = 1006, _REPLICAS
    GET_BROKER_EPOCH_CACHE = 1007, _REPLICAS
    NOTIFY_BROKER_ROLE_CHANGED = 1008, "", _SERVERS
    UPDATE_CONTROLLER_CONFIG = 1009, _SET
    GET_CONTROLLER_CONFIG = 1010, _SETTINGS
    CLEAN_BROKER_DATA = 1011, "use popmq drain"
    CONTROLLER_GET_NEXT_BROKER_ID = 1012, "", _SERVERS
    CONTROLLER_APPLY_BROKER_ID = 1013, "", _SERVERS
    UPDATE_COLD_DATA_FLOW_CTR_CONFIG = 2001, _COLD
    REMOVE_COLD_DATA_FLOW_CTR_CONFIG = 2002, _COLD
    GET_COLD_DATA_FLOW_CTR_INFO = 2003, _COLD
    SET_COMMITLOG_READ_MODE = 2004, _COLD
    AUTH_CREATE_USER = 3001, "use popmq user create"
    AUTH_UPDATE_USER = 3002, "use popmq user alter"
    AUTH_DELETE_USER = 3003, "use popmq user delete"
    AUTH_GET_USER = 3004, "use popmq user show"
    AUTH_LIST_USER = 3005, "use popmq user list"
    AUTH_CREATE_ACL = 3006, "use popmq user grant"
    AUTH_UPDATE_ACL = 3007, "use popmq user grant"
    AUTH_DELETE_ACL = 3008, "use popmq user revoke"
    AUTH_GET_ACL = 3009, "use popmq user show"
    AUTH_LIST_ACL = 3010, "use popmq user list"
    SWITCH_TIMER_ENGINE = 5001, "popmq has one timer engine, see popmq timers"
    POP_MESSAGE = 200050, ""
    ACK_MESSAGE = 200051, ""
    PEEK_MESSAGE = 200052, "", _UNUSED
    CHANGE_MESSAGE_INVISIBLETIME = 200053, ""
    NOTIFICATION = 200054, "", _SERVERS
    POLLING_INFO = 200055, "", _UNUSED
    POP_ROLLBACK = 200056, "popmq has nothing to export, see popmq lag for what is in flight"
    POP_LITE_MESSAGE = 200070, _LITE
    LITE_SUBSCRIPTION_CTL = 200071, _LITE
    ACK_LITE_MESSAGE = 200072, "", _UNUSED
    NOTIFY_UNSUBSCRIBE_LITE = 200073, "", _SERVERS
    GET_BROKER_LITE_INFO = 200074, _LITE_LAG
    GET_PARENT_TOPIC_INFO = 200075, _LITE_LAG
    GET_LITE_TOPIC_INFO = 200076, _LITE_LAG
    GET_LITE_CLIENT_INFO = 200077, "lite topics are served over gRPC only: use popmq clients"
    GET_LITE_GROUP_INFO = 200078, _LITE_LAG
    TRIGGER_LITE_DISPATCH = 200079, _LITE
    BATCH_ACK_MESSAGE = 200151, "", _SERVERS


def why_refused(number: int) -> str:
    """Why a request with that code is refused, and what to use instead."""
    try:
        code = RequestCode(number)
    except ValueError:
        return f"popmq does not serve request code {number} (docs/reference/remoting.md)"
    why = code.direction.value or code.text
    return f"popmq does not serve request code {number} ({code.name}): {why}"
