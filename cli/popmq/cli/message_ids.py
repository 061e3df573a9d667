"""MessageIds: what names the messages that the command and the test broker send."""

import os
import secrets
from itertools import count

_ID_EPOCH_S = 1_609_459_200  # 2021-01-01T00:00:00Z


class MessageIds:
    """Ids in the public format: version 01, host, process, seconds since 2021, a counter.

    The six host bytes are random: two containers may well share a hardware address and a pid.
    """

    def __init__(self) -> None:
        self._process = secrets.token_hex(6) + f"{os.getpid() & 0xFFFF:04x}"
        self._numbers = count()

    def next(self, now_s: int) -> str:
        number = next(self._numbers) & 0xFFFFFFFF
        return f"01{self._process}{(now_s - _ID_EPOCH_S) & 0xFFFFFFFF:08x}{number:08x}".upper()
