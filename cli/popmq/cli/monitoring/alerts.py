"""The alerts: what an operator has to know of without looking."""

from popmq.cli.monitoring.alert import Alert, Severity

_CRITICAL, _WARNING = Severity.CRITICAL, Severity.WARNING
_A = '{instance="a",job="popmq"}'
_OF_A = {"instance": "a", "job": "popmq"}
_GROUP = '{broker="broker-a"}'
_ALWAYS, _NEVER, _GROWS = "1+0xN", "0+0xN", "0+1xN"


def _above(
    name: str,
    metric: str,
    limit: float,
    lasting: str,
    severity: Severity,
    summary: str,
    what_to_do: str,
    labels: str = _A,
) -> Alert:
    """A gauge that is above `limit` for so long."""
    shown = dict(part.split("=") for part in labels.strip("{}").split(",") if part)
    return Alert(
        name,
        metric,
        f"> {limit:.10g}",
        lasting,
        severity,
        summary,
        what_to_do,
        {metric + labels: f"{limit + 1:.10g}+0xN"},
        {metric + labels: f"{limit:.10g}+0xN"},
        {key: text.strip('"') for key, text in shown.items()},
    )


def _counts(name: str, metric: str, severity: Severity, summary: str, what_to_do: str) -> Alert:
    """A counter that moved within the last ten minutes."""
    return Alert(
        name,
        f"increase({metric}[10m])",
        "> 0",
        "0s",
        severity,
        summary,
        what_to_do,
        {metric + _A: "0+0x100 1+0x20"},
        {metric + _A: "5+0xN"},
        _OF_A,
    )


def _flush(bound: str) -> str:
    return f'popmq_store_flush_seconds_bucket{{instance="a",le="{bound}"}}'


def _took(method: str, bound: str) -> str:
    labels = f'method="{method}",instance="a",le="{bound}"'
    return f"popmq_proxy_request_seconds_bucket{{{labels}}}"


ALERTS = (
    Alert(
        "PopmqDown",
        'up{job=~".*popmq.*"}',
        "< 1",
        "1m",
        _CRITICAL,
        "A process of popmq does not answer.",
        "Look whether it runs and what its log says; `popmq broker list` shows the others.",
        {f"up{_A}": _NEVER},
        {f"up{_A}": _ALWAYS, 'up{job="other"}': _NEVER},
        _OF_A,
    ),
    _above(
        "PopmqMessagesUnaccounted",
        "popmq_audit_unaccounted_messages",
        0,
        "1m",
        _CRITICAL,
        "Stored messages are neither waiting nor ended.",
        "A fault of popmq: keep the data directory, look for the group in the log "
        "(`messages are unaccounted for`), use `popmq explain`, and report it.",
    ),
    _above(
        "PopmqAuditBehind",
        "popmq_audit_age_seconds",
        1_800,
        "5m",
        _WARNING,
        "The audit does not keep up.",
        "The broker writes more than is recounted; what is unaccounted for is told later.",
    ),
    _above(
        "PopmqGroupWithoutLeader",
        "popmq_controller_without_leader",
        0,
        "15s",
        _CRITICAL,
        "Nobody leads a broker group, and nobody can.",
        "Start the brokers of its SyncStateSet; `popmq broker list` names them.",
        _GROUP,
    ),
    Alert(
        "PopmqTooFewInSync",
        "popmq_replication_in_sync_replicas - popmq_replication_min_in_sync_replicas",
        "< 0",
        "1m",
        _CRITICAL,
        "A broker group refuses sends: too few replicas are in sync.",
        "Start the missing brokers, or look why they lag.",
        {
            f"popmq_replication_in_sync_replicas{_A}": "1+0xN",
            f"popmq_replication_min_in_sync_replicas{_A}": "2+0xN",
        },
        {
            f"popmq_replication_in_sync_replicas{_A}": "2+0xN",
            f"popmq_replication_min_in_sync_replicas{_A}": "2+0xN",
        },
        _OF_A,
    ),
    Alert(
        "PopmqReplicaMissing",
        "popmq_controller_replicas - popmq_controller_replicas_alive",
        "> 0",
        "2m",
        _WARNING,
        "A broker of a group is not heard of.",
        "The group serves, but has one failure less in hand. Start it again.",
        {
            f"popmq_controller_replicas{_GROUP}": "2+0xN",
            f"popmq_controller_replicas_alive{_GROUP}": "1+0xN",
        },
        {
            f"popmq_controller_replicas{_GROUP}": "2+0xN",
            f"popmq_controller_replicas_alive{_GROUP}": "2+0xN",
        },
        {"broker": "broker-a"},
    ),
    _above(
        "PopmqReplicaLags",
        "popmq_replication_lag_bytes",
        64 << 20,
        "2m",
        _WARNING,
        "A slave is far behind its master.",
        "Look at its disk and network; while it is out of the SyncStateSet it cannot take over.",
    ),
    _counts(
        "PopmqReplicaDiverged",
        "popmq_replication_diverged_total",
        _CRITICAL,
        "The tables of a slave were not its master's.",
        "A fault of popmq. Compare DATA/differing/own and DATA/differing/master with popmq doctor "
        "diff, and report it.",
    ),
    _above(
        "PopmqReplicaDiffers",
        "popmq_replication_differs",
        0,
        "10m",
        _CRITICAL,
        "A slave's tables are not its master's, and it is not rebuilt.",
        "It keeps its store. Look at popmq broker list and at the controller's log, and run popmq "
        "doctor diff before anything is removed.",
    ),
    _above(
        "PopmqDiskFilling",
        "popmq_store_disk_used_ratio",
        0.8,
        "5m",
        _WARNING,
        "The disk of a broker is 80 % full.",
        "Sends stop at store.disk_stop_percent (90): shorten the retention or grow the disk.",
    ),
    _above(
        "PopmqDiskFull",
        "popmq_store_disk_full",
        0,
        "0s",
        _CRITICAL,
        "A broker refuses sends, because its disk is full.",
        "Make room; sends go on by themselves.",
    ),
    Alert(
        "PopmqDiskSlow",
        "histogram_quantile(0.99,"
        " sum by (instance, le) (rate(popmq_store_flush_seconds_bucket[5m])))",
        "> 0.5",
        "5m",
        _WARNING,
        "Group commits of a broker take more than half a second.",
        "Every answer waits for the disk; look who else uses it.",
        {_flush("0.5"): "0+1xN", _flush("1"): "0+10xN", _flush("+Inf"): "0+10xN"},
        {_flush("0.5"): "0+10xN", _flush("1"): "0+10xN", _flush("+Inf"): "0+10xN"},
        {"instance": "a"},
    ),
    _counts(
        "PopmqDamagedMessages",
        "popmq_store_damaged_messages_total",
        _CRITICAL,
        "Records of the log are damaged on the disk.",
        "The log names their positions; check the disk, and the store with `popmq doctor`.",
    ),
    Alert(
        "PopmqConsumerBehind",
        "max by (group, topic) (popmq_consumer_queueing_latency_seconds)",
        "> 300",
        "5m",
        _WARNING,
        "Messages wait for a consumer group for more than five minutes.",
        "Are its consumers alive, do they fail, are they too few? `popmq lag` shows what waits.",
        {'popmq_consumer_queueing_latency_seconds{group="g",topic="t"}': "400+15xN"},
        {'popmq_consumer_queueing_latency_seconds{group="g",topic="t"}': "300+0xN"},
        {"group": "g", "topic": "t"},
    ),
    Alert(
        "PopmqConsumerAgeUnknown",
        "max by (group, topic) (popmq_consumer_unknown_age_queues)",
        "> 0",
        "10m",
        _WARNING,
        "Nobody can tell how long messages wait for a consumer group.",
        "The oldest record cannot be read: the broker's log names the disk's errors or the "
        "damaged record; see also `popmq doctor`.",
        {'popmq_consumer_unknown_age_queues{group="g",topic="t"}': "1+0xN"},
        {'popmq_consumer_unknown_age_queues{group="g",topic="t"}': "0+0xN"},
        {"group": "g", "topic": "t"},
    ),
    Alert(
        "PopmqConsumerStopped",
        "(sum by (group, topic) (popmq_consumer_ready_messages) > 0) * 0"
        " + sum by (group, topic) (increase(popmq_group_messages_out_total[10m]))",
        "== 0",
        "5m",
        _WARNING,
        "A group that took messages before takes none, though there are some.",
        "Its consumers are gone or hang.",
        {
            'popmq_consumer_ready_messages{group="g",topic="t"}': "7+0xN",
            'popmq_group_messages_out_total{group="g",topic="t"}': "50+0xN",
        },
        {
            'popmq_consumer_ready_messages{group="g",topic="t"}': "7+0xN",
            'popmq_group_messages_out_total{group="g",topic="t"}': "50+1xN",
            'popmq_consumer_ready_messages{group="idle",topic="t"}': "0+0xN",
            'popmq_group_messages_out_total{group="idle",topic="t"}': "50+0xN",
        },
        {"group": "g", "topic": "t"},
    ),
    _counts(
        "PopmqDeadLetters",
        "popmq_send_to_dlq_messages_total",
        _WARNING,
        "Messages became dead letters.",
        "`popmq dlq list` shows them; `popmq dlq redrive` sends them again.",
    ),
    _above(
        "PopmqReviveLate",
        "popmq_pop_revive_latency_seconds",
        10,
        "1m",
        _WARNING,
        "Messages that were not acked come back late.",
        "The broker has too much to do, or its disk is full.",
    ),
    _above(
        "PopmqTimersLate",
        "popmq_timer_dequeue_lag_seconds",
        10,
        "1m",
        _WARNING,
        "Delayed messages are late.",
        "Too many are due at once, or the broker has too much to do.",
    ),
    _counts(
        "PopmqTimersLost",
        "popmq_timer_lost_total",
        _CRITICAL,
        "The body of a delayed message cannot be read.",
        "The log names it; check the disk, and the store with `popmq doctor`.",
    ),
    _above(
        "PopmqTimerCheckPointOld",
        "popmq_timer_checkpoint_age_seconds",
        60,
        "5m",
        _WARNING,
        "A replica has heard of no new TimerCheckPoint for a minute.",
        "It would look through more timers as master. Is it connected to its master?",
    ),
    Alert(
        "PopmqLimitHit",
        "sum by (limit) (rate(popmq_limits_hit_total[5m]))",
        "> 0",
        "5m",
        _WARNING,
        "A bound refuses clients.",
        "The label is the setting: raise it, or look who asks for so much.",
        {'popmq_limits_hit_total{instance="a",limit="poll.waiters"}': _GROWS},
        {'popmq_limits_hit_total{instance="a",limit="poll.waiters"}': "9+0xN"},
        {"limit": "poll.waiters"},
    ),
    Alert(
        "PopmqSendsSlow",
        "histogram_quantile(0.99, sum by (instance, le)"
        ' (rate(popmq_proxy_request_seconds_bucket{method="SendMessage"}[5m])))',
        "> 1",
        "5m",
        _WARNING,
        "Sends take more than a second.",
        "Look at group commits, replication lag and the CPU of proxies and brokers.",
        {
            _took("SendMessage", "1"): "0+1xN",
            _took("SendMessage", "2"): "0+9xN",
            _took("SendMessage", "+Inf"): "0+9xN",
        },
        {
            _took("SendMessage", "1"): "0+9xN",
            _took("SendMessage", "+Inf"): "0+9xN",
            _took("ReceiveMessage", "1"): _NEVER,
            _took("ReceiveMessage", "+Inf"): "0+9xN",
        },
        {"instance": "a"},
    ),
    _above(
        "PopmqWaitingForMaster",
        "popmq_proxy_waiting_for_master",
        0,
        "30s",
        _CRITICAL,
        "Requests wait for a broker group that has no master.",
        "`popmq broker list` says why.",
    ),
)
