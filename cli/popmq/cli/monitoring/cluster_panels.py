"""Dashboards of the parts of a cluster: timers, replicas, proxies, pods."""

from popmq.cli.monitoring.dashboard import Dashboard, Panel, PanelQuery
from popmq.cli.monitoring.queries import RATE, quantile, rate

TIMERS = Dashboard(
    "timers",
    "timers",
    (
        Panel(
            "Due within",
            "Each window without the one before; counted once a minute.",
            "short",
            [
                PanelQuery(
                    "sum by (within_seconds) (popmq_timer_forecast_messages)",
                    "{{within_seconds}} s",
                )
            ],
            stacked=True,
        ),
        Panel(
            "Waiting",
            "By topic.",
            "short",
            [PanelQuery("sum by (topic) (popmq_timer_timing_messages)", "{{topic}}")],
        ),
        Panel(
            "How late they fire",
            "Of those that fired.",
            "s",
            [
                PanelQuery(quantile("popmq_timer_lateness_seconds", at, "job"), f"p{at * 100:g}")
                for at in (0.5, 0.99)
            ],
        ),
        Panel(
            "In and out",
            "Records put into the wheel, timers that fired.",
            "mps",
            [
                PanelQuery(rate("popmq_timer_enqueue_total"), "{{instance}} in"),
                PanelQuery(rate("popmq_timer_dequeue_total"), "{{instance}} fired"),
            ],
        ),
        Panel(
            "Overdue",
            "How long the next timer is overdue.",
            "s",
            [PanelQuery("popmq_timer_dequeue_lag_seconds", "{{instance}}")],
        ),
        Panel(
            "Not in the wheel yet",
            "Age of the oldest.",
            "s",
            [
                PanelQuery("popmq_timer_enqueue_lag_seconds", "{{instance}}"),
            ],
        ),
        Panel(
            "Recalled and given another time",
            "By clients.",
            "mps",
            [
                PanelQuery(rate("popmq_timer_recalled_total"), "{{instance}} recalled"),
                PanelQuery(rate("popmq_timer_rescheduled_total"), "{{instance}} rescheduled"),
            ],
        ),
        Panel(
            "Refused, spread, lost",
            "At the bounds of the timer; bodies that cannot be read.",
            "short",
            [
                PanelQuery(rate("popmq_timer_refused_total"), "{{instance}} refused"),
                PanelQuery(rate("popmq_timer_spread_total"), "{{instance}} spread"),
                PanelQuery(rate("popmq_timer_lost_total"), "{{instance}} lost"),
            ],
        ),
        Panel(
            "Age of the TimerCheckPoint",
            "That a replica knows: what it would look through again as master.",
            "s",
            [
                PanelQuery("popmq_timer_checkpoint_age_seconds", "{{instance}}"),
                PanelQuery(
                    "popmq_controller_timer_check_point_age_seconds", "{{broker}} (controller)"
                ),
            ],
        ),
    ),
)

REPLICATION = Dashboard(
    "replication",
    "replication",
    (
        Panel(
            "In sync",
            "Members of each SyncStateSet, by the controller.",
            "short",
            [PanelQuery("popmq_controller_in_sync", "{{broker}}")],
        ),
        Panel(
            "Replicas heard of",
            "And how many are known.",
            "short",
            [
                PanelQuery("popmq_controller_replicas_alive", "{{broker}} alive"),
                PanelQuery("popmq_controller_replicas", "{{broker}} known"),
            ],
        ),
        Panel(
            "Without a leader",
            "1: nobody leads, and nobody can.",
            "short",
            [PanelQuery("popmq_controller_without_leader", "{{broker}}")],
        ),
        Panel(
            "Lag of slaves",
            "Behind their master's end.",
            "bytes",
            [PanelQuery("popmq_replication_slave_lag_bytes", "{{instance}}: {{node}}")],
        ),
        Panel(
            "Not confirmed yet",
            "Appended and not where it has to be.",
            "bytes",
            [PanelQuery("popmq_store_end_bytes - popmq_store_confirmed_bytes", "{{instance}}")],
        ),
        Panel(
            "Epochs",
            "They move at elections.",
            "short",
            [
                PanelQuery("popmq_replication_epoch", "{{instance}}"),
                PanelQuery("popmq_controller_epoch", "{{broker}} (record)"),
            ],
        ),
        Panel(
            "Elections",
            "Won by the controller, accepted by brokers.",
            "short",
            [
                PanelQuery(f"increase(popmq_controller_elections_total{RATE})", "{{broker}}"),
                PanelQuery(f"increase(popmq_replication_elections_total{RATE})", "{{instance}}"),
            ],
        ),
        Panel(
            "Roles",
            "What each broker is.",
            "short",
            [PanelQuery("popmq_replication_role == 1", "{{instance}}: {{role}}")],
        ),
        Panel(
            "Truncated, rebuilt, diverged",
            "Diverged tables are a fault of popmq.",
            "short",
            [
                PanelQuery(f"increase(popmq_{name}_total{RATE})", f"{{{{instance}}}} {what}")
                for what, name in (
                    ("truncations", "replication_truncations"),
                    ("rebuilds", "store_rebuilds"),
                    ("diverged", "replication_diverged"),
                )
            ],
        ),
        Panel(
            "Copies",
            "Of slaves that are far behind.",
            "percent",
            [PanelQuery("popmq_replication_copied_percent", "{{instance}}")],
        ),
    ),
)

PROXIES = Dashboard(
    "proxies",
    "proxies",
    (
        Panel(
            "Requests",
            "By method.",
            "reqps",
            [PanelQuery(rate("popmq_proxy_request_seconds_count", "method"), "{{method}}")],
        ),
        Panel(
            "Time of requests",
            "The 99th percentile; of receives their wait included.",
            "s",
            [PanelQuery(quantile("popmq_proxy_request_seconds", 0.99, "method"), "{{method}}")],
        ),
        Panel(
            "Refusals",
            "By RocketMQ code.",
            "reqps",
            [PanelQuery(rate("popmq_proxy_refused_total", "code"), "{{code}}")],
        ),
        Panel(
            "Messages",
            "Stored, handed out, acked.",
            "mps",
            [
                PanelQuery(rate("popmq_proxy_sends_total"), "{{instance}} sent"),
                PanelQuery(rate("popmq_proxy_received_total"), "{{instance}} received"),
                PanelQuery(rate("popmq_proxy_acks_total"), "{{instance}} acked"),
            ],
        ),
        Panel(
            "Long polls",
            "is_long_polling: ready to wait; is_short_polling_hit: the first look found messages; "
            "pop with notify: nothing anywhere, so it waited at all broker groups.",
            "reqps",
            [
                PanelQuery(rate("popmq_proxy_is_long_polling_total", "job"), "is_long_polling"),
                PanelQuery(
                    f"sum(rate(popmq_proxy_is_short_polling_hit_total{RATE}))"
                    f" + sum(rate(popmq_is_short_polling_hit_total{RATE}))",
                    "is_short_polling_hit",
                ),
                PanelQuery(rate("popmq_proxy_pop_with_notify_total", "job"), "pop with notify"),
            ],
        ),
        Panel(
            "Waiting receives",
            "Open long polls.",
            "short",
            [PanelQuery("popmq_proxy_waiting_receives", "{{instance}}")],
        ),
        Panel(
            "Connections and streams",
            "Of the public port.",
            "short",
            [
                PanelQuery("popmq_proxy_lean_connections", "{{instance}} connections"),
                PanelQuery("popmq_proxy_lean_streams", "{{instance}} calls"),
                PanelQuery("popmq_proxy_open_streams", "{{instance}} telemetry"),
            ],
        ),
        Panel(
            "Cut off",
            "Connections and streams that passed a bound, or broke the protocol.",
            "short",
            [
                PanelQuery(rate("popmq_proxy_lean_cut_off_total", "bound"), "{{bound}}"),
                PanelQuery(rate("popmq_proxy_lean_faults_total"), "{{instance}} faults"),
            ],
        ),
        Panel(
            "Asked again",
            "Requests whose broker group changed its master, and those that wait for one.",
            "short",
            [
                PanelQuery(rate("popmq_proxy_retried_total"), "{{instance}} asked again"),
                PanelQuery("popmq_proxy_waiting_for_master", "{{instance}} wait"),
            ],
        ),
        Panel(
            "Frames",
            "Requests between processes, those refused, and those in flight.",
            "short",
            [
                PanelQuery(rate("popmq_frames_requests_total", "role"), "{{role}}"),
                PanelQuery(rate("popmq_frames_refused_total", "role"), "{{role}} refused"),
                PanelQuery("sum by (role) (popmq_frames_in_flight)", "{{role}} in flight"),
            ],
        ),
    ),
)

KUBERNETES = Dashboard(
    "kubernetes",
    "Kubernetes",
    (
        Panel(
            "Up",
            "Targets that answer the scrape; in Kubernetes one for each pod.",
            "short",
            [PanelQuery('up{job=~".*popmq.*"}', "{{instance}} {{pod}}")],
        ),
        Panel(
            "Versions",
            "Pods by what they run: two lines during a rolling update.",
            "short",
            [PanelQuery("count by (role, version) (popmq_build_info)", "{{role}} {{version}}")],
        ),
        Panel(
            "Restarts",
            "Changes of the start time within the hour.",
            "short",
            [
                PanelQuery(
                    'changes(process_start_time_seconds{job=~".*popmq.*"}[1h])', "{{instance}}"
                )
            ],
        ),
        Panel(
            "CPU",
            "Cores in use.",
            "short",
            [
                PanelQuery(
                    f'rate(process_cpu_seconds_total{{job=~".*popmq.*"}}{RATE})'
                    " * on (instance) group_left (role) popmq_build_info",
                    "{{role}} {{instance}}",
                )
            ],
        ),
        Panel(
            "Memory",
            "Resident.",
            "bytes",
            [
                PanelQuery(
                    'process_resident_memory_bytes{job=~".*popmq.*"}'
                    " * on (instance) group_left (role) popmq_build_info",
                    "{{role}} {{instance}}",
                )
            ],
        ),
        Panel(
            "Open files",
            "Of what the process may open; every queue has one.",
            "percentunit",
            [
                PanelQuery(
                    'process_open_fds{job=~".*popmq.*"} / process_max_fds{job=~".*popmq.*"}',
                    "{{instance}}",
                )
            ],
        ),
        Panel(
            "Volumes",
            "Free bytes of each broker's.",
            "bytes",
            [PanelQuery("popmq_store_disk_free_bytes", "{{instance}}")],
        ),
        Panel(
            "Missing replicas",
            "Known, and not heard of.",
            "short",
            [
                PanelQuery(
                    "popmq_controller_replicas - popmq_controller_replicas_alive",
                    "{{broker}}",
                )
            ],
        ),
        Panel(
            "Read at start",
            "Records that each broker read when it started last.",
            "short",
            [PanelQuery("popmq_store_recovered_records", "{{instance}}")],
        ),
    ),
)
