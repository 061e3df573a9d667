"""Dashboards of messages: an overview, topics and groups, deliveries."""

from popmq.cli.monitoring.dashboard import Dashboard, Panel, PanelQuery
from popmq.cli.monitoring.queries import RATE, quantile, rate

_PAIR = '{group=~"$group",topic=~"$topic"}'
_PAIR_NAMES = "{{group}} / {{topic}}"
_GROUP_VARIABLES = (
    ("group", "label_values(popmq_consumer_lag_messages, group)"),
    ("topic", "label_values(popmq_consumer_lag_messages, topic)"),
)


def _pair(name: str) -> str:
    return f"sum by (group, topic) ({name}{_PAIR})"


OVERVIEW = Dashboard(
    "overview",
    "overview",
    (
        Panel(
            "Unaccounted messages",
            "Recounted from the log; anything but 0 is a fault of popmq.",
            "short",
            [PanelQuery("sum(popmq_audit_unaccounted_messages)")],
            kind="stat",
        ),
        Panel(
            "Broker groups with a master",
            "Of those that the controller knows.",
            "short",
            [
                PanelQuery("sum(popmq_controller_brokers_alive)", "with a master"),
                PanelQuery("sum(popmq_controller_brokers)", "known"),
            ],
            kind="stat",
        ),
        Panel(
            "Lag",
            "Messages that all groups have still to do.",
            "short",
            [PanelQuery("sum(popmq_consumer_lag_messages)")],
            kind="stat",
        ),
        Panel(
            "Messages in",
            "Stored by topic; retries and dead letters are not counted.",
            "mps",
            [PanelQuery(rate("popmq_messages_in_total", "topic"), "{{topic}}")],
            stacked=True,
        ),
        Panel(
            "Messages delivered and acked",
            "By group.",
            "mps",
            [
                PanelQuery(rate("popmq_group_messages_out_total", "group"), "{{group}} delivered"),
                PanelQuery(rate("popmq_group_messages_acked_total", "group"), "{{group}} acked"),
            ],
        ),
        Panel(
            "Bytes to the log",
            "Everything is a record of the log: deliveries and acks, too.",
            "Bps",
            [PanelQuery(rate("popmq_store_appended_bytes_total"), "{{instance}}")],
        ),
        Panel(
            "Time of sends",
            "At the proxy, from the request to the answer.",
            "s",
            [
                PanelQuery(
                    quantile("popmq_proxy_request_seconds", at, "job", '{method="SendMessage"}'),
                    f"p{at * 100:g}",
                )
                for at in (0.5, 0.99)
            ],
        ),
        Panel(
            "Group commits",
            "Write and fdatasync, the 99th percentile.",
            "s",
            [PanelQuery(quantile("popmq_store_flush_seconds", 0.99), "{{instance}}")],
        ),
        Panel(
            "Records of a group commit",
            "How well syncs are shared.",
            "short",
            [
                PanelQuery(
                    f"rate(popmq_store_flush_records_sum{RATE})"
                    f" / rate(popmq_store_flush_records_count{RATE})",
                    "{{instance}}",
                )
            ],
        ),
        Panel(
            "Bytes of a group commit",
            "The median.",
            "bytes",
            [PanelQuery(quantile("popmq_store_flush_bytes", 0.5), "{{instance}}")],
        ),
        Panel(
            "Disks",
            "Used; sends stop at store.disk_stop_percent.",
            "percentunit",
            [PanelQuery("popmq_store_disk_used_ratio", "{{instance}}")],
        ),
        Panel(
            "Refused by a bound",
            "By the setting that is the bound.",
            "short",
            [PanelQuery(rate("popmq_limits_hit_total", "limit"), "{{limit}}")],
        ),
    ),
)

LAG = Dashboard(
    "lag",
    "topics and groups",
    (
        Panel(
            "Lag",
            "Ready, in flight and blocked.",
            "short",
            [PanelQuery(_pair("popmq_consumer_lag_messages"), _PAIR_NAMES)],
        ),
        Panel(
            "Age of the oldest ready message",
            "How long consumers let it wait.",
            "s",
            [
                PanelQuery(
                    f"max by (group, topic) (popmq_consumer_queueing_latency_seconds{_PAIR})",
                    _PAIR_NAMES,
                )
            ],
        ),
        Panel(
            "Worked off in",
            "At the speed of the last minute; +Inf while the lag does not shrink.",
            "s",
            [PanelQuery(f"max by (group, topic) (popmq_consumer_eta_seconds{_PAIR})", _PAIR_NAMES)],
        ),
        Panel(
            "What the lag is made of",
            "All groups and topics that are chosen.",
            "short",
            [
                PanelQuery(f"sum(popmq_consumer_{part}_messages{_PAIR})", part)
                for part in ("ready", "inflight", "blocked")
            ],
            stacked=True,
        ),
        Panel(
            "Retries among the ready",
            "Messages that came back.",
            "short",
            [PanelQuery(_pair("popmq_consumer_retry_messages"), _PAIR_NAMES)],
        ),
        Panel(
            "Delivered",
            "Retries included.",
            "mps",
            [
                PanelQuery(
                    f"sum by (group, topic) (rate(popmq_group_messages_out_total{_PAIR}{RATE}))",
                    _PAIR_NAMES,
                )
            ],
        ),
        Panel(
            "Acked",
            "Below what is delivered: consumers fail, or are too slow.",
            "mps",
            [
                PanelQuery(
                    f"sum by (group, topic) (rate(popmq_group_messages_acked_total{_PAIR}{RATE}))",
                    _PAIR_NAMES,
                )
            ],
        ),
        Panel(
            "Dead letters kept",
            "By group.",
            "short",
            [PanelQuery('sum by (group) (popmq_dlq_messages{group=~"$group"})', "{{group}}")],
        ),
        Panel(
            "What became of messages",
            "Since the audit began, recounted from the log.",
            "short",
            [
                PanelQuery(
                    'sum by (state) (popmq_audit_messages{group=~"$group",state!="stored"})',
                    "{{state}}",
                )
            ],
            stacked=True,
        ),
    ),
    variables=_GROUP_VARIABLES,
)

POP = Dashboard(
    "pop",
    "pop and revive",
    (
        Panel(
            "Pops",
            "Attempts to take messages, and those that found nothing.",
            "short",
            [
                PanelQuery(rate("popmq_pops_total"), "{{instance}}"),
                PanelQuery(rate("popmq_empty_pops_total"), "{{instance}} empty"),
            ],
        ),
        Panel(
            "From delivery to ack",
            "In log time.",
            "s",
            [
                PanelQuery(quantile("popmq_ack_latency_seconds", at, "job"), f"p{at * 100:g}")
                for at in (0.5, 0.95, 0.99)
            ],
        ),
        Panel(
            "Check points in memory",
            "Each holds what one receive took of one queue.",
            "short",
            [PanelQuery("popmq_check_points", "{{instance}}")],
        ),
        Panel(
            "Came back",
            "Messages that were not acked in time, or refused by their consumer.",
            "mps",
            [
                PanelQuery(rate("popmq_pop_revive_retry_messages_total"), "{{instance}}"),
                PanelQuery(
                    rate("popmq_pop_revive_returned_messages_total"), "{{instance}} in place"
                ),
            ],
        ),
        Panel(
            "Overdue revives",
            "How long the oldest has waited for the broker.",
            "s",
            [PanelQuery("popmq_pop_revive_latency_seconds", "{{instance}}")],
        ),
        Panel(
            "Check points that are overdue",
            "More than for a moment: the broker has too much to do.",
            "short",
            [PanelQuery("popmq_pop_revive_lag_check_points", "{{instance}}")],
        ),
        Panel(
            "Dead letters",
            "After the last attempt, or at a consumer's request.",
            "mps",
            [
                PanelQuery(rate("popmq_send_to_dlq_messages_total"), "{{instance}}"),
                PanelQuery(rate("popmq_rejected_messages_total"), "{{instance}} by request"),
            ],
        ),
        Panel(
            "Waiting receives",
            "Long polls at the brokers.",
            "short",
            [PanelQuery("popmq_waiting_receives", "{{instance}}")],
        ),
        Panel(
            "Ends of waiting receives",
            "With messages, or when their time was over.",
            "short",
            [
                PanelQuery(rate("popmq_receives_woken_total"), "{{instance}} woken"),
                PanelQuery(rate("popmq_receives_timed_out_total"), "{{instance}} timed out"),
            ],
        ),
        Panel(
            "Handles that were no good",
            "Acks that came too late, mostly: the invisible time is too short.",
            "short",
            [PanelQuery(rate("popmq_refused_handles_total"), "{{instance}}")],
        ),
        Panel(
            "Passed over",
            "Filtered, or expired before a group read them.",
            "mps",
            [
                PanelQuery(rate("popmq_filtered_messages_total"), "{{instance}} filtered"),
                PanelQuery(rate("popmq_expired_messages_total"), "{{instance}} expired"),
            ],
        ),
        Panel(
            "Half messages",
            "Transactions that are neither committed nor rolled back.",
            "short",
            [PanelQuery("popmq_half_messages", "{{instance}}")],
        ),
    ),
)
