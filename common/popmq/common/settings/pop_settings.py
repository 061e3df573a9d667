"""How messages are delivered, and what deliveries may cost, as settings (docs/concepts/pop.md)."""

from dataclasses import dataclass

from popmq.common.quantities import DAY_MS, GIB, HOUR_MS, KIB, MIB
from popmq.common.settings.section import SettingsSection, constant, within

_MAX_BUFFERED_MS = 10 * 60_000


@dataclass(frozen=True, slots=True)
class PopSettings(SettingsSection):
    invisible_default_ms: int = within(60_000, 1, 7 * DAY_MS)
    invisible_min_ms: int = within(1, 1, 7 * DAY_MS)
    invisible_max_ms: int = within(12 * HOUR_MS, 1, 7 * DAY_MS)
    max_in_flight_per_queue: int = within(100_000, 1, 10_000_000)
    max_in_flight_per_broker: int = within(1_000_000, 1, 10_000_000)
    max_batch: int = within(32, 1, 64)  # the members of a check point are bits of a u64
    reply_bytes: int = within(8 * MIB, 64 * KIB, GIB)
    retry_first_percent: int = within(20, 0, 100)
    # Of a topic of type priority: one receive in so many begins with a lower queue.
    priority_turn: int = constant(8)
    catch_up_percent: int = within(8, 1, 100)
    catch_up_behind_bytes: int = constant(64 * MIB)
    revive_step_ms: int = within(16, 1, 60_000)
    # Of a FIFO group in one queue: messages that were looked at and are not over.
    fifo_open_offsets: int = within(10_000, 1, 1_000_000)
    fifo_park_after_ms: int = within(60_000, 1, 7 * DAY_MS)
    fifo_parked_messages: int = within(100_000, 0, 10_000_000)  # of a group in one topic
    # Buffered check points: RocketMQ's popCkMaxBufferSize, popCkStayBufferTime,
    # popCkStayBufferTimeOut, and the 1,500 ms of its PopBufferMergeService.
    check_point_buffer_size: int = within(200_000, 0, 10_000_000)
    check_point_stay_ms: int = within(10_000, 1, _MAX_BUFFERED_MS)
    check_point_write_ahead_ms: int = within(3_000, 1, _MAX_BUFFERED_MS)
    check_point_min_stay_ms: int = within(1_500, 0, _MAX_BUFFERED_MS)

    def relations(self) -> None:
        low, high = self.invisible_min_ms, self.invisible_max_ms
        if self.invisible_default_ms < low:
            raise self.refuse("invisible_default_ms", f"at least pop.invisible_min_ms = {low}")
        if self.invisible_default_ms > high:
            raise self.refuse("invisible_default_ms", f"at most pop.invisible_max_ms = {high}")
        stay = self.check_point_stay_ms
        if self.check_point_min_stay_ms > stay:
            limit = f"at most pop.check_point_stay_ms = {stay}"
            raise self.refuse("check_point_min_stay_ms", limit)
