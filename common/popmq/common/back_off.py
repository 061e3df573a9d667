"""An exponential back-off of a consumer group, with jitter that a replay repeats.

Delivery n (from 1) that failed waits min(max, initial * multiplier^(n-1)), and then up to
`jitter_percent` of that more: never less, because clients are told the times without jitter.
"""

from dataclasses import dataclass

from popmq.common.errors import Code, Refused

INITIAL_MS, MAX_MS, MULTIPLIER_MILLI = 1_000, 7_200_000, 2_000
DURATION_LIMIT_MS = 12 * 3_600_000
MULTIPLIER_LIMIT_MILLI = 100_000
_SECOND_MS = 1_000


@dataclass(frozen=True, slots=True)
class ExponentialBackOff:
    """`multiplier_milli` is in thousandths: 2000 doubles."""

    initial_ms: int = INITIAL_MS
    max_ms: int = MAX_MS
    multiplier_milli: int = MULTIPLIER_MILLI
    jitter_percent: int = 0

    def check(self) -> None:
        """Raise BAD_REQUEST for values that no group can have."""
        if not 1 <= self.initial_ms <= self.max_ms <= DURATION_LIMIT_MS:
            raise Refused(
                Code.BAD_REQUEST,
                f"an exponential back-off from {self.initial_ms} ms to {self.max_ms} ms: it takes "
                f"1 to {DURATION_LIMIT_MS} ms, and the first no longer than the last",
            )
        if not 1_000 <= self.multiplier_milli <= MULTIPLIER_LIMIT_MILLI:
            raise Refused(
                Code.BAD_REQUEST,
                f"a multiplier of {self.multiplier_milli / 1000:g}: it takes 1 to "
                f"{MULTIPLIER_LIMIT_MILLI // 1000}",
            )
        if not 0 <= self.jitter_percent <= 100:
            raise Refused(
                Code.BAD_REQUEST, f"a jitter of {self.jitter_percent} %: it takes 0 to 100 %"
            )

    def delay_without_jitter_ms(self, attempt: int) -> int:
        """How long delivery `attempt` (from 1) waits for the next, without jitter."""
        wait_ms = self.initial_ms
        if self.multiplier_milli == 1_000:
            return wait_ms
        for _ in range(attempt - 1):
            wait_ms = wait_ms * self.multiplier_milli // 1000
            if wait_ms >= self.max_ms:
                return self.max_ms
        return wait_ms

    def after_ms(self, attempt: int, message: bytes) -> int:
        """The same with jitter. `message` names the message: the same name and attempt wait the
        same time in every replay, two messages of one batch do not."""
        plain_ms = self.delay_without_jitter_ms(attempt)
        widest_ms = plain_ms * self.jitter_percent // 100
        if not widest_ms:
            return plain_ms
        from hashlib import blake2b  # 3 ms, which commands need not spend

        digest = blake2b(message + attempt.to_bytes(4, "big"), digest_size=8).digest()
        return plain_ms + int.from_bytes(digest, "big") % (widest_ms + 1)

    def whole_second_steps(self, limit: int) -> tuple[int, ...]:
        """As customised steps, for clients that read nothing else and count in whole seconds.

        Rounded up, at most `limit` of them; the last one repeats.
        """
        steps: list[int] = []
        for attempt in range(1, limit + 1):
            plain_ms = self.delay_without_jitter_ms(attempt)
            steps.append(-(-plain_ms // _SECOND_MS) * _SECOND_MS)
            if plain_ms >= self.max_ms or self.delay_without_jitter_ms(attempt + 1) == plain_ms:
                break
        return tuple(steps)
