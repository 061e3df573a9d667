"""SigningKeys: what signs receipt handles and transaction ids, and what older keys still verify.

A key has an id of a byte, which stands in the top byte of a number that is signed and never gets
that large.  The first key has id 0, so what it signs is what versions without ids sign and verify.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from popmq.common.errors import Code, Refused

ID_SHIFT = 56  # of the id in a number of 64 bits
PLAIN_MASK = (1 << ID_SHIFT) - 1
IDS = 256
LIVE_LIMIT = 64


class SigningKey(NamedTuple):
    """`until_ms`, of log time: nothing that it signed counts later; 0: it signs now."""

    id: int
    secret: bytes
    until_ms: int = 0

    def __repr__(self) -> str:
        return f"SigningKey(id={self.id}, until_ms={self.until_ms})"


class SigningKeys:
    """The newest key is the last one. Empty until the log has one."""

    def __init__(self, log_ms: Callable[[], int], keys: Iterable[SigningKey] = ()) -> None:
        self._log_ms = log_ms
        self._keys: dict[int, SigningKey] = {}
        self.replace(keys)

    @classmethod
    def of(cls, *secrets: bytes) -> "SigningKeys":
        """Keys without an end, with ids from 0."""
        return cls(lambda: 0, [SigningKey(at, secret) for at, secret in enumerate(secrets)])

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __iter__(self) -> Iterator[SigningKey]:
        return iter(self._keys.values())

    def replace(self, keys: Iterable[SigningKey]) -> None:
        self._keys = {key.id: key for key in keys}
        self.newest = next(reversed(self._keys.values()), SigningKey(0, b""))

    def find(self, key_id: int) -> bytes | None:
        """The secret of a key that counts."""
        key = self._keys.get(key_id)
        if key is None or (key.until_ms and self._log_ms() > key.until_ms):
            return None
        return key.secret

    def rotated(self, secret: bytes, life_ms: int) -> Sequence[SigningKey]:
        """The keys after a rotation: those that count no more are gone. Raises
        TOO_MANY_REQUESTS."""
        now_ms = self._log_ms()
        until_ms = now_ms + life_ms
        kept = [
            key._replace(until_ms=key.until_ms or until_ms)
            for key in self._keys.values()
            if not key.until_ms or key.until_ms >= now_ms
        ]
        if len(kept) >= LIVE_LIMIT:
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"{len(kept)} keys still verify what they have signed, which is the limit; the "
                f"oldest one ends in {max(0, kept[0].until_ms - now_ms) // 1_000} s",
            )
        return [*kept, SigningKey((self.newest.id + 1) % IDS, secret)]
