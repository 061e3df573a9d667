"""What names a pending timer to a client: the send returns it, a recall uses it.

The form is RocketMQ's, url-safe base64 of `v1 TOPIC BROKER DUE_MS MESSAGE_ID`.  It is not signed:
whoever may send to a topic may recall from it.
"""

import binascii
import re
from base64 import b64decode, urlsafe_b64encode
from dataclasses import dataclass

from popmq.common.errors import Code, Refused

VERSION = "v1"
HANDLE_LIMIT = 1_024  # characters; with the longest names a handle has 692
_DUE = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class RecallHandle:
    """`due_ms` is wall milliseconds. A message id may be any text."""

    topic: str
    broker: str
    due_ms: int
    message_id: str

    def encode(self) -> str:
        text = f"{VERSION} {self.topic} {self.broker} {self.due_ms} {self.message_id}"
        return urlsafe_b64encode(text.encode()).decode()

    @classmethod
    def decode(cls, handle: str) -> "RecallHandle":
        """Raises BAD_REQUEST with what is wrong with it."""
        if not handle.strip():
            raise _bad("is empty: only a message that waits for its time has one")
        if len(handle) > HANDLE_LIMIT:
            raise _bad(f"of {len(handle)} characters is over the limit of {HANDLE_LIMIT}")
        try:
            padded = handle + "=" * (-len(handle) % 4)
            text = b64decode(padded, altchars=b"-_", validate=True).decode()
        except (binascii.Error, ValueError) as error:
            raise _bad("is not base64 text") from error
        parts = text.split(" ", 4)
        if len(parts) < 5 or not all(parts):
            raise _bad("does not hold version, topic, broker, time and message id")
        version, topic, broker, due, message_id = parts
        if version != VERSION:
            raise _bad(f"is of version {version[:40]!r}, and only {VERSION} is known")
        if not _DUE.fullmatch(due):
            raise _bad(f"holds {due[:40]!r} instead of a time")
        return cls(topic, broker, int(due), message_id)


def _bad(sentence: str) -> Refused:
    return Refused(Code.BAD_REQUEST, f"the recall handle {sentence}")
