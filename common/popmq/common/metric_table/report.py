"""What a broker keeps and reads for reports."""

from popmq.common.metric_table.row import MetricRole, counter, gauge, rows

REPORT = rows(
    MetricRole.BROKER,
    counter("report_samples", "Samples of offsets, topics and timers that were taken."),
    gauge("report_sample_bytes", "Memory that samples take; bounded by `reports.sample_bytes`."),
    counter("report_read_bytes", "Read for reports."),
    counter(
        "report_reads_held_back",
        "Reads of reports that had to wait because of `reports.read_bytes_per_second`.",
    ),
)
