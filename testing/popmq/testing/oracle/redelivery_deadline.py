"""I2, no limbo: after healing, what was invisible comes back within its time and two seconds."""

from typing import TYPE_CHECKING

from popmq.testing.oracle.client_history import Held, MessageHistory

if TYPE_CHECKING:
    from popmq.testing.oracle.delivery_oracle import Oracle

LIMBO_MS = 2_000


def check_limbo(oracle: "Oracle", before: Held, life: MessageHistory, who: str) -> None:
    """It came again, and `before` is its last delivery."""
    began = max(oracle.healed_ms, before.asked_ms)
    # A key goes on when all that was delivered together is back.
    away_ms = max(before.invisible_ms, oracle.longest_ms if before.reader.group.fifo else 0)
    late = oracle.now_ms - began - away_ms - oracle.clients.silence_ms(before)
    if before.superseded != 1 and late > LIMBO_MS:
        oracle.report_violation("I2 no-limbo", f"{who}: came back {late} ms late", life)
