"""What the lean transport counts, as readings of the table."""

from popmq.common.metric_table.table import reading
from popmq.common.observability import Metric
from popmq.proxy.transport.lean.bounds import CONNECTION_BOUNDS, STREAM_BOUNDS, TLS_REFUSALS
from popmq.proxy.transport.lean.server import LeanTransport


def lean_metrics(transport: LeanTransport) -> list[Metric]:
    counts = transport.counters
    found = [
        reading("proxy_lean_connections", counts.connections),
        reading("proxy_lean_streams", counts.streams),
        reading("proxy_lean_incoming_bytes", counts.incoming_bytes),
        reading("proxy_lean_calls", counts.calls),
        reading("proxy_lean_faults", counts.faults),
        reading("proxy_lean_idle_closed", counts.idle_closed),
        reading("proxy_lean_aged", counts.aged),
    ]
    found += [
        reading("proxy_lean_tls_refused", counts.tls_refused[why], why) for why in TLS_REFUSALS
    ]
    if (certificates := transport.certificates) is not None:
        found.append(reading("proxy_lean_tls_reloads", certificates.reloaded))
        found.append(reading("proxy_lean_tls_reload_failures", certificates.refused))
    for bound in (*CONNECTION_BOUNDS, *STREAM_BOUNDS):
        found.append(reading("proxy_lean_cut_off", counts.cut_off[bound], bound))
    return found
