"""The broker's queues: what comes in and goes out, deliveries, revives, lag, transactions."""

from popmq.common.metric_table.row import MetricRole, counter, gauge, histogram, rows

_PAIRS = "1,000 pairs; of more those with the least to do are summed as `_others`"
_TOPICS = "1,000 topics; of more those with the fewest are summed as `_others`"
_CODES = "the codes of RocketMQ, below 60"
_LIMITS = "the bounds of the broker, below 10"
_GROUPS = "1,000 groups; of more those with the fewest are summed as `_others`"

POP = rows(
    MetricRole.BROKER,
    counter(
        "messages_in",
        "Messages stored; retries and dead letters are not counted.",
        ["topic"],
        _TOPICS,
    ),
    counter("messages_out", "Messages delivered."),
    counter(
        "group_messages_out",
        "Messages delivered to a group; retries count for their topic.",
        ["group", "topic"],
        _PAIRS,
    ),
    counter(
        "group_messages_acked",
        "Messages that a group acked; retries count for their topic.",
        ["group", "topic"],
        _PAIRS,
    ),
    counter("pops", "Attempts to take messages, those of waiting receives included."),
    counter("empty_pops", "Attempts that found nothing."),
    counter("refused_in_flight", "Receives refused by a `pop.max_in_flight_` bound."),
    counter("cold_pops", "Pops that waited for old messages to be read from the disk."),
    counter("pops_held_back", "Pops of groups far behind that waited for their share of the loop."),
    counter("pops_undone", "Check points whose reply nobody took; the same attempt comes again."),
    counter(
        "expired_messages",
        "Messages lost to retention or their TTL before a group read them.",
    ),
    counter("filtered_messages", "Messages that receives passed over because of their filters."),
    gauge("sql_filters", "SQL filters that are kept compiled."),
    counter("sql_filters_compiled", "Compilations of SQL filters."),
    gauge("half_messages", "Half messages that are neither committed nor rolled back."),
    counter("transactions_committed", "Half messages committed."),
    counter("transactions_rolled_back", "Half messages rolled back."),
    counter("transactions_checked", "Checks of half messages by a producer."),
    counter("transactions_given_up", "Half messages that no producer knew; now dead letters."),
    counter("transactions_lost", "Half messages whose body could not be read."),
    counter("transactions_refused", "Half messages refused at the bound."),
    gauge("waiting_proxies", "Proxies that wait for checks of half messages."),
    counter("duplicate_sends", "Resends of a message id, which stored nothing."),
    gauge("dedup_ids", "Message ids that are remembered."),
    counter(
        "dedup_ids_pushed_out", "Ids that were forgotten before their time: raise `dedup.max_ids`."
    ),
    gauge("lite_topics", "Lite topics that there are, of all parent topics."),
    counter("lite_topics_made", "Lite topics made since the start."),
    counter("lite_topics_removed", "Lite topics removed because no message came for their time."),
    gauge("lite_subscribers", "Clients that subscribed to lite topics, for each parent topic."),
    gauge("lite_subscriptions", "Subscriptions of all clients to lite topics."),
    gauge("waiting_receives", "Receives that wait at the broker for a message."),
    counter("receives_woken", "Waiting receives that got messages."),
    counter("receives_timed_out", "Waiting receives that did not."),
    counter(
        "is_short_polling_hit",
        "Receives that were ready to wait and found messages at the broker's first look.",
    ),
    counter("pulls", "Requests of pull consumers."),
    counter("pulled_messages", "Messages given to pull consumers."),
    counter("illegal_pull_offsets", "Pulls outside of the queue, e.g. behind the retention."),
    counter("pull_offsets_set", "Offsets that pull consumers set."),
    counter("acks", "Acks written."),
    counter("repeated_acks", "Acks of what was acked before."),
    histogram("ack_latency_seconds", "From a delivery to its ack, of each message, in log time."),
    counter("refused_handles", "Receipt handles that were no good."),
    counter("changed_invisible", "Invisible durations changed."),
    counter("pop_revive_retry_messages", "Messages that came back to the retry topic."),
    counter("pop_revive_returned_messages", "Messages that came back in FIFO groups, in place."),
    counter("pop_revive_lost_messages", "Given up, because the message cannot be read."),
    gauge(
        "pop_revive_latency_seconds",
        "How long the check point that is due for the longest has waited for its revive.",
    ),
    gauge("pop_revive_lag_check_points", "Check points that are due and were not revived yet."),
    counter("renewed_deliveries", "Looks at deliveries of push consumers that live."),
    counter("send_to_dlq_messages", "Messages that became dead letters."),
    gauge("dlq_messages", "Dead letters that are kept, of each group.", ["group"], _GROUPS),
    counter("rejected_messages", "Dead letters by a consumer's request."),
    counter("redriven_messages", "Dead letters sent back."),
    counter("parked_messages", "Messages of stuck message groups moved to parking topics."),
    counter("offset_resets", "Queues whose offset an operator set."),
    gauge("buffered_check_points", "Check points held in memory only (buffered groups)."),
    counter("buffered_check_points_opened", "Check points that were held in memory."),
    counter("buffered_check_points_written", "Those of them that had to be written."),
    counter("buffered_commits", "Offsets written for acks of buffered groups."),
    gauge("check_points", "Check points in memory."),
    counter(
        "outcomes_dropped",
        "Outcomes of deliveries forgotten before their 10 minutes; late acks hear `expired`.",
    ),
    counter("broker_refused", "Requests that the broker refused.", ["code"], _CODES),
    counter("limits_hit", "Requests refused by a bound.", ["limit"], _LIMITS),
)

_STATES = "9 states of 100 groups; those with the most that are not accounted for, or stored"

AUDIT = rows(
    MetricRole.BROKER,
    gauge(
        "audit_unaccounted_messages",
        "Stored messages that neither wait nor ended, recounted from the log: 0, or a fault. "
        "Not there before the first recount.",
    ),
    gauge("audit_age_seconds", "Since the moment that the newest recount is about."),
    counter("audit_passes", "Recounts that were compared with the tables."),
    counter(
        "audit_restarts",
        "Recounts begun anew: a record was gone or damaged, or there are 200,000 check points.",
    ),
    gauge(
        "audit_messages",
        "Messages of a group since the audit began, by what became of them: `stored` is the sum of "
        "the other states. Groups that keep order or buffer their check points are left out.",
        ["group", "state"],
        _STATES,
    ),
)

CONSUMER = rows(
    MetricRole.BROKER,
    gauge(
        "consumer_lag_messages",
        "Ready, in flight and blocked.",
        ["group", "topic"],
        _PAIRS,
    ),
    gauge(
        "consumer_ready_messages",
        "What a receive would find; retries count for their topic.",
        ["group", "topic"],
        _PAIRS,
    ),
    gauge(
        "consumer_inflight_messages",
        "Delivered, neither acked nor back.",
        ["group", "topic"],
        _PAIRS,
    ),
    gauge(
        "consumer_delayed_messages",
        "That wait in the topic for their delivery time; no lag yet.",
        ["group", "topic"],
        _PAIRS,
    ),
    gauge(
        "consumer_blocked_messages",
        "Behind one of their message group that is in flight (FIFO).",
        ["group", "topic"],
        _PAIRS,
    ),
    gauge(
        "consumer_retry_messages",
        "Of the ready ones, those in the retry topic.",
        ["group", "topic"],
        _PAIRS,
    ),
    gauge(
        "consumer_queueing_latency_seconds",
        "Age of the oldest ready message; 0 without one, absent while nobody knows it. "
        "Looked up every few seconds.",
        ["group", "topic"],
        _PAIRS,
    ),
    gauge(
        "consumer_unknown_age_queues",
        "Queues whose oldest ready message has an age that cannot be read; the latency leaves them "
        "out.",
        ["group", "topic"],
        _PAIRS,
    ),
    gauge(
        "consumer_eta_seconds",
        "Until the lag is worked off, at the speed of the last minute; +Inf if it does not shrink.",
        ["group", "topic"],
        _PAIRS,
    ),
)
