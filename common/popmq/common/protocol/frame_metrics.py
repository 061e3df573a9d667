"""What a frame server counts, as readings of the table."""

from popmq.common.metric_table.table import reading
from popmq.common.observability import Metric
from popmq.common.protocol.frame_server import FrameServer
from popmq.common.protocol.frames import ProcessRole


def frame_metrics(server: FrameServer, role: ProcessRole) -> list[Metric]:
    return [
        reading("frames_connections", len(server.connections), role),
        reading("frames_in_flight", server.in_flight, role),
        reading("frames_requests", server.requests, role),
        reading("frames_refused", server.refused, role),
        reading("frames_forbidden", server.forbidden, role),
    ]
