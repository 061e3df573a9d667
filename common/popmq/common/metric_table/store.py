"""The broker's store: the log, its disk, group commits, retention."""

from popmq.common.metric_table.row import MetricRole, counter, gauge, histogram, rows

STORE = rows(
    MetricRole.BROKER,
    counter("store_records", "Records appended to the log since start."),
    counter("store_appended_bytes", "Bytes appended to the log since start."),
    counter("store_flushes", "Group commits, each one fdatasync."),
    histogram("store_flush_seconds", "How long a group commit took, write and fdatasync."),
    histogram("store_flush_records", "Records that one group commit made durable."),
    histogram("store_flush_bytes", "Bytes that one group commit made durable."),
    counter("store_slow_flushes", "Group commits that took 1 s and more; each is logged."),
    gauge("store_disk_used_ratio", "Of the disk that holds the data directory."),
    gauge("store_disk_free_bytes", "Of the disk that holds the data directory."),
    gauge("store_disk_full", "1 while sends are refused for lack of space."),
    counter("store_sends_refused", "Sends refused for lack of space."),
    counter(
        "store_writes_refused", "Acks and receives refused because the reserve was used up, too."
    ),
    gauge(
        "store_disk_failed",
        "1 from a write or fsync of the log that failed until the process has stopped for it.",
    ),
    gauge(
        "store_last_stop_clean",
        "0 when the stop before this start was a kill, a power cut or a disk that failed.",
    ),
    counter("store_snapshots_abandoned", "Snapshots that could not be written; tried again."),
    counter(
        "store_damaged_messages",
        "Reads of records that are damaged on the disk, or that say nothing known; each is logged "
        "with its position.",
    ),
    counter("store_snapshots", "Snapshots written."),
    gauge("store_snapshot_bytes", "Log position of the newest snapshot."),
    counter("store_checkpoints", "Checkpoints written."),
    gauge("store_end_bytes", "Position of the log's end."),
    gauge("store_confirmed_bytes", "Position up to which everything is where it has to be."),
    gauge(
        "store_pending_bytes",
        "Not yet handed to the disk; bounded by `store.max_pending_bytes`.",
    ),
    gauge("store_recovered_records", "Records read at the last start."),
    gauge("store_torn_bytes", "Bytes of a torn tail that were cut at the last start."),
    counter("store_moved_bodies", "Messages in flight that retention appended again."),
    counter("store_deleted_segments", "Segments of the log that retention deleted."),
)
