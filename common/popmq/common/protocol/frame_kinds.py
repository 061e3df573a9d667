"""What one process asks of another: the kinds of frames."""

from enum import IntEnum


class Kind(IntEnum):
    """Second byte of a frame's header (docs/concepts/frames.md)."""

    HELLO = 1
    REPLY = 2
    ERROR = 3
    CANCEL = 4
    PUT = 16
    POP = 17
    ACK = 18
    CHANGE = 19
    CLIENTS = 20
    REJECT = 28
    DESCRIBE_TOPIC = 32
    CREATE_TOPIC = 33
    ALTER_TOPIC = 34
    DELETE_TOPIC = 35
    LIST_TOPICS = 36
    DESCRIBE_GROUP = 37
    CREATE_GROUP = 38
    ALTER_GROUP = 39
    DELETE_GROUP = 40
    LIST_GROUPS = 41
    FIND_MESSAGES = 42
    RECALL = 43
    RESCHEDULE = 44
    LIST_TIMERS = 45
    FORECAST_TIMERS = 46
    TIME_SPANS = 47
    EXPLAIN = 48
    LAG = 49
    RESET_OFFSET = 50
    LIST_DEAD_LETTERS = 51
    REDRIVE = 52
    DESCRIBE_TABLES = 53
    READ_RAW = 54
    NAMES = 55
    UNPARK = 56
    DRAIN = 57
    END_TRANSACTION = 58
    CHECKS = 59
    PULL = 60
    UPDATE_OFFSET = 61
    GET_OFFSET = 62
    QUERY_OFFSET = 63
    REGISTER = 64
    ROUTES = 65
    ALTER_SYNC_STATE_SET = 66
    WATCH_GROUP = 67
    LIST_REPLICAS = 68
    FAILOVER = 69
    HANDSHAKE = 80
    FETCH = 81
    ACKED = 82
    READ_SNAPSHOT = 83
    TIMER_CHECK_POINT = 84
    HAND_OVER = 85
    DESCRIBE_ROLE = 86
    COPY_META = 87
    SYNC_LITE = 88
    TAKE_TIMERS = 89
