"""Recall handles: RocketMQ's form, and a sentence for each way to be none."""

from base64 import urlsafe_b64encode

import pytest

from popmq.common.errors import Code, PopmqError
from popmq.common.record.recall_handle import HANDLE_LIMIT, RecallHandle

LONGEST = RecallHandle("t" * 127, "b" * 100, (1 << 53), "i" * 255)


def coded(text: str) -> str:
    return urlsafe_b64encode(text.encode()).decode()


def test_a_handle_has_rocketmqs_form() -> None:
    handle = RecallHandle("later", "broker-a", 1_700_000_000_123, "01AB")
    assert handle.encode() == coded("v1 later broker-a 1700000000123 01AB")


@pytest.mark.parametrize("message_id", ["01AB", "two words", " ", "ünï 🎉", "?" * 255, ">>>"])
def test_what_was_encoded_is_decoded(message_id: str) -> None:
    handle = RecallHandle("later", "broker-a", 5, message_id)
    assert RecallHandle.decode(handle.encode()) == handle
    assert RecallHandle.decode(handle.encode().rstrip("=")) == handle


def test_the_longest_names_fit() -> None:
    assert len(LONGEST.encode()) <= HANDLE_LIMIT
    assert RecallHandle.decode(LONGEST.encode()) == LONGEST


@pytest.mark.parametrize(
    ("handle", "words"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("nonsense!", "is not base64 text"),
        ("härte", "is not base64 text"),
        ("A", "is not base64 text"),
        ("_____w==", "is not base64 text"),
        ("A" * (HANDLE_LIMIT + 1), "over the limit of 1024"),
        (coded("v1 later broker-a 5"), "does not hold"),
        (coded("v1 later broker-a 5 "), "does not hold"),
        (coded("v1  broker-a 5 01AB"), "does not hold"),
        (coded("v2 later broker-a 5 01AB"), "is of version 'v2'"),
        (coded("v1 later broker-a soon 01AB"), "holds 'soon' instead of a time"),
        (coded("v1 later broker-a -5 01AB"), "holds '-5' instead of a time"),
        (coded("v1 later broker-a \u0665 01AB"), "instead of a time"),
        (coded(f"v1 later broker-a {'9' * 400} 01AB"), "instead of a time"),
    ],
)
def test_what_is_no_handle_is_a_bad_request_that_says_why(handle: str, words: str) -> None:
    with pytest.raises(PopmqError) as caught:
        RecallHandle.decode(handle)
    assert caught.value.code is Code.BAD_REQUEST
    assert words in str(caught.value)
