"""Result codes of the Remoting protocol, and which of them a refusal of popmq's becomes."""

from enum import IntEnum

from popmq.common.errors import Code


class ResultCode(IntEnum):
    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    NOT_SUPPORTED = 3
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    VERSION_NOT_SUPPORTED = 15
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    GROUP_NOT_EXIST = 26
    NO_MESSAGE = 208
    POLLING_TIMEOUT = 210
    GO_AWAY = 1500


_CODES = {
    Code.TOPIC_NOT_FOUND: ResultCode.TOPIC_NOT_EXIST,
    Code.CONSUMER_GROUP_NOT_FOUND: ResultCode.GROUP_NOT_EXIST,
    # Only this one lets a client begin at its default; any other error makes it ask again.
    Code.OFFSET_NOT_FOUND: ResultCode.QUERY_NOT_FOUND,
    Code.FORBIDDEN: ResultCode.NO_PERMISSION,
    Code.UNAUTHORIZED: ResultCode.NO_PERMISSION,
    Code.TOO_MANY_REQUESTS: ResultCode.SYSTEM_BUSY,
    Code.HA_NOT_AVAILABLE: ResultCode.SERVICE_NOT_AVAILABLE,
    Code.ILLEGAL_FILTER_EXPRESSION: ResultCode.SUBSCRIPTION_PARSE_FAILED,
    Code.INVALID_RECEIPT_HANDLE: ResultCode.NO_MESSAGE,
    Code.NOT_IMPLEMENTED: ResultCode.NOT_SUPPORTED,
    Code.UNSUPPORTED: ResultCode.NOT_SUPPORTED,
    # A client does not send again what is wrong with the message itself.
    Code.ILLEGAL_TOPIC: ResultCode.MESSAGE_ILLEGAL,
    Code.ILLEGAL_MESSAGE_TAG: ResultCode.MESSAGE_ILLEGAL,
    Code.ILLEGAL_MESSAGE_KEY: ResultCode.MESSAGE_ILLEGAL,
    Code.ILLEGAL_MESSAGE_GROUP: ResultCode.MESSAGE_ILLEGAL,
    Code.ILLEGAL_MESSAGE_PROPERTY_KEY: ResultCode.MESSAGE_ILLEGAL,
    Code.ILLEGAL_MESSAGE_ID: ResultCode.MESSAGE_ILLEGAL,
    Code.ILLEGAL_DELIVERY_TIME: ResultCode.MESSAGE_ILLEGAL,
    Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE: ResultCode.MESSAGE_ILLEGAL,
    Code.MESSAGE_CORRUPTED: ResultCode.MESSAGE_ILLEGAL,
    Code.MESSAGE_BODY_TOO_LARGE: ResultCode.MESSAGE_ILLEGAL,
    Code.MESSAGE_BODY_EMPTY: ResultCode.MESSAGE_ILLEGAL,
    Code.MESSAGE_PROPERTIES_TOO_LARGE: ResultCode.MESSAGE_ILLEGAL,
}


def result_code(code: int) -> ResultCode:
    """SYSTEM_ERROR for what has no code of its own; a client asks again, or tells its user."""
    try:
        return _CODES.get(Code(code), ResultCode.SYSTEM_ERROR)
    except ValueError:
        return ResultCode.SYSTEM_ERROR
