"""The proxy and its transport, and what every process says of itself and its frames."""

from popmq.common.metric_table.row import MetricRole, counter, gauge, histogram, rows

_ROLES = "one for each role that serves here"

PROXY = rows(
    MetricRole.PROXY,
    counter("proxy_sends", "Messages stored for clients."),
    counter("proxy_receives", "ReceiveMessage calls."),
    counter("proxy_received", "Messages handed to clients."),
    counter("proxy_pulls", "PullMessage calls."),
    counter("proxy_pulled", "Messages handed to pull consumers."),
    counter("proxy_acks", "Acks answered OK."),
    counter("proxy_changes", "Invisible durations changed."),
    counter("proxy_transaction_checks", "Checks handed to producers."),
    counter(
        "proxy_lite_notices",
        "Lite topics that consumers were told they are subscribed to no more.",
    ),
    counter("proxy_retried", "Requests asked again of a broker group's master."),
    gauge("proxy_waiting_for_master", "Requests whose broker group has no master now."),
    gauge("proxy_open_streams", "Telemetry streams."),
    gauge("proxy_waiting_receives", "Receives that wait for a message."),
    counter("proxy_is_long_polling", "ReceiveMessage calls that were ready to wait."),
    counter(
        "proxy_pop_with_notify",
        "Receives that found nothing at first and were then to be told by all broker groups.",
    ),
    counter(
        "proxy_plain_polls",
        "Receives that waited at one broker group each, because many waited "
        "(`poll.switch_poll_limit`).",
    ),
    counter(
        "proxy_is_short_polling_hit",
        "Long polling receives that a first look at one broker group, without waiting, answered. "
        "With one broker group that look is the broker's: `popmq_is_short_polling_hit_total`.",
    ),
    histogram(
        "proxy_request_seconds",
        "From a request to its answer; of ReceiveMessage the wait for a message included.",
        ["method"],
        "the methods of the public API",
    ),
    counter(
        "proxy_refused", "Refusals by RocketMQ code.", ["code"], "the codes of RocketMQ, below 60"
    ),
    gauge("proxy_lean_connections", "Open connections of the lean transport."),
    gauge("proxy_lean_streams", "Calls in progress."),
    gauge("proxy_lean_incoming_bytes", "Received of messages that are not complete."),
    counter("proxy_lean_calls", "Calls taken."),
    counter("proxy_lean_faults", "Connections that broke the protocol."),
    counter("proxy_lean_idle_closed", "Connections closed as idle."),
    counter("proxy_lean_aged", "Connections that reached `lean.max_age_ms`."),
    counter(
        "proxy_lean_tls_refused",
        "Connections refused for their TLS, or for having none.",
        ["why"],
        "the reasons, below 10",
    ),
    counter("proxy_lean_tls_reloads", "Changed certificates that were loaded."),
    counter(
        "proxy_lean_tls_reload_failures",
        "Changed certificates that could not be used; the old one stays.",
    ),
    counter(
        "proxy_lean_cut_off",
        "Connections and streams that passed a bound.",
        ["bound"],
        "the bounds of the transport, below 20",
    ),
    gauge(
        "proxy_workers",
        "Workers that listen. All others of the proxy have a label `worker` then.",
    ),
    counter("proxy_worker_restarts", "Workers that died and were started again."),
    counter("proxy_worker_cpu_seconds", "User and system time of a worker."),
    gauge("proxy_worker_resident_bytes", "Memory of a worker."),
)

PROCESS = rows(
    MetricRole.EVERY,
    gauge("build_info", "1, with the version that runs.", ["version", "role"], _ROLES),
    counter(
        "loop_cpu_seconds",
        "CPU of the thread that runs the loop. A rate of 1 is a loop that can do no more.",
    ),
    gauge(
        "frames_connections", "Frame connections of proxies, brokers and tools.", ["role"], _ROLES
    ),
    gauge("frames_in_flight", "Requests over frames that wait for their answer.", ["role"], _ROLES),
    counter("frames_requests", "Requests over frames.", ["role"], _ROLES),
    counter(
        "frames_refused", "Requests over frames refused by a `frames.` bound.", ["role"], _ROLES
    ),
)
