"""Delayed messages, from the timer queue to their topics."""

from popmq.common.metric_table.row import MetricRole, counter, gauge, histogram, rows

_TOPICS = "1,000 topics; of more those with the fewest, and deleted ones, are `_others`"

TIMER = rows(
    MetricRole.BROKER,
    gauge("timer_enqueue_lag_messages", "Stored and not in the timer wheel yet."),
    gauge(
        "timer_enqueue_lag_seconds",
        "Age of the oldest of them; it grows when enqueueing is stuck.",
    ),
    gauge("timer_dequeue_lag_seconds", "How long the next timer, or slot, is overdue."),
    gauge(
        "timer_late_messages",
        "Timers beside the wheel, because the newest firing was behind their time when they came; "
        "bounded by `timer.late_limit`.",
    ),
    gauge(
        "timer_cancelled_held",
        "Recalled or moved timers that are remembered; bounded by `timer.cancelled_limit`.",
    ),
    gauge(
        "timer_far_held",
        "Timers beyond the wheel's window that `timer.slot_limit` counts; bounded at 500,000.",
    ),
    gauge("timer_files_blocked", "1 while the timer's files cannot be written: the disk is full."),
    gauge(
        "timer_forecast_messages",
        "Due within so long, and not within the window before. Counted in small steps after it was "
        "asked for, at most once a minute, so the first scrape has none. One that was recalled "
        "or moved while it rolls (due beyond the wheel) counts until its slot is over.",
        ["within_seconds"],
        "9 windows",
    ),
    gauge("timer_timing_messages", "That wait for their delivery time.", ["topic"], _TOPICS),
    counter("timer_enqueue", "Records of the timer queue put into the wheel."),
    counter("timer_dequeue", "Timers that fired."),
    histogram("timer_lateness_seconds", "How late they fired."),
    counter("timer_recalled", "Recalled before their time."),
    counter("timer_rescheduled", "Given another time."),
    counter("timer_lost", "Timers whose body could not be read."),
    counter(
        "timer_dead_lettered",
        "Timers whose topic was deleted; they are in `%DLQ%CID_RMQ_SYS_TIMER`.",
    ),
    counter("timer_refused", "Sends refused by `timer.slot_limit` or `timer.late_limit`."),
    counter("timer_spread", "Timers put into a later slot that had room."),
    counter(
        "timer_far_forgotten",
        "Timers beyond the wheel's window that are not counted any more: others came at the bound.",
    ),
    counter(
        "timer_rolled", "Units put on into a later slot: the wheel is shorter than their delay."
    ),
    counter("timer_moved_bodies", "Bodies that retention appended again."),
    counter("timer_moved_out", "Timers that other broker groups took while this one was drained."),
    counter("timer_moved_in", "Timers taken over from broker groups that are drained."),
    gauge("timer_leaving", "Timers that another broker group is being asked to take."),
    counter(
        "timer_cold_reads",
        "Times that slots or bodies had left the page cache, and another thread fetched them.",
    ),
    counter("timer_rebuilds", "Times that the wheel was damaged and made anew."),
    counter(
        "timer_turned_back",
        "Times that the wheel was made anew: the wall clock had been far ahead.",
    ),
    counter("timer_checks", "Daily counts of the pending timers."),
    counter(
        "timer_check_mismatches",
        "Topics whose count of pending timers was wrong, and was put right.",
    ),
)
