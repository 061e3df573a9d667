"""Every refusal of popmq, each with the RocketMQ code a client sees.

One tree: a caller's mistake or a normal refusal is a `PopmqError` raised where it is known
and turned into a wire status in one place (the proxy's `convert.py`, a frame's ERROR reply).
The numbers are those of the public protocol (enum `Code`).
"""

from enum import IntEnum


class Code(IntEnum):
    """Result codes of the public protocol that popmq uses."""

    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_MESSAGE_TAG = 40004
    ILLEGAL_MESSAGE_KEY = 40005
    ILLEGAL_MESSAGE_GROUP = 40006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007
    INVALID_TRANSACTION_ID = 40008
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    UNRECOGNIZED_CLIENT_TYPE = 40015
    MESSAGE_CORRUPTED = 40016
    CLIENT_ID_REQUIRED = 40017
    ILLEGAL_OFFSET = 40019
    ILLEGAL_LITE_TOPIC = 40020
    UNAUTHORIZED = 40100
    FORBIDDEN = 40300
    NOT_FOUND = 40400
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402
    CONSUMER_GROUP_NOT_FOUND = 40403
    OFFSET_NOT_FOUND = 40404
    REQUEST_TIMEOUT = 40800
    PAYLOAD_TOO_LARGE = 41300
    MESSAGE_BODY_TOO_LARGE = 41301
    MESSAGE_BODY_EMPTY = 41302
    PRECONDITION_FAILED = 42800
    TOO_MANY_REQUESTS = 42900
    LITE_TOPIC_QUOTA_EXCEEDED = 42901
    LITE_SUBSCRIPTION_QUOTA_EXCEEDED = 42902
    MESSAGE_PROPERTIES_TOO_LARGE = 43101
    INTERNAL_ERROR = 50000
    INTERNAL_SERVER_ERROR = 50001
    HA_NOT_AVAILABLE = 50002
    NOT_IMPLEMENTED = 50100
    PROXY_TIMEOUT = 50400
    UNSUPPORTED = 50500
    VERSION_UNSUPPORTED = 50501
    # Between our processes only, not of the public enum.
    NOT_MASTER = 90001
    NOT_COPIED = 90002
    OTHER_INCARNATION = 90003


class PopmqError(Exception):
    """A refusal with a code; the message is one sentence for the person who caused it."""

    code: Code = Code.INTERNAL_ERROR


class Refused(PopmqError):
    """A refusal whose code is given at the place that raises it."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class TopicNotFound(PopmqError):
    code = Code.TOPIC_NOT_FOUND


class GroupNotFound(PopmqError):
    code = Code.CONSUMER_GROUP_NOT_FOUND


class InvalidReceiptHandle(PopmqError):
    code = Code.INVALID_RECEIPT_HANDLE


class TooManyRequests(PopmqError):
    """A bound was reached; the caller may try again later."""

    code = Code.TOO_MANY_REQUESTS


class DeadlineExceeded(PopmqError):
    """The caller's time ran out; whether a write happened is unknown."""

    code = Code.PROXY_TIMEOUT


class Unavailable(PopmqError):
    """The broker (or controller) cannot be reached now; trying again is right.

    `unknown`: the request had left, so that it may have been done; else it was not.
    """

    code = Code.HA_NOT_AVAILABLE

    def __init__(self, message: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown


class NotMaster(PopmqError):
    """The broker is not its group's master: nothing was done, the one who asks looks at the routes.

    A proxy asks again elsewhere and never shows this code to a client.
    """

    code = Code.NOT_MASTER


class NotCopied(PopmqError):
    """The request names a topic or a group that was made again, and this broker group has not
    copied that yet.  Nothing was done; a proxy asks again until its time is over."""

    code = Code.NOT_COPIED


class OtherIncarnation(PopmqError):
    """A send was placed for an older topic of that name.  Nothing was done; a proxy asks for the
    description again, and places the message anew."""

    code = Code.OTHER_INCARNATION


class ConfigError(PopmqError):
    """A setting has an unknown name or an impossible value."""

    code = Code.BAD_REQUEST


class StoreDamaged(PopmqError):
    """Files on disk contradict each other; the message names file, position and way out."""

    code = Code.INTERNAL_ERROR
