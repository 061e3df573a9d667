"""A task's work: its ranges of records, as Arrow record batches."""

from collections.abc import Iterator
from typing import Any

from popmq.common.errors import Code, Unavailable
from popmq.common.wire import report_pb2 as pb
from popmq.reports.records.arrow_rows import record_batch
from popmq.reports.records.endpoint import ReportEndpoint
from popmq.reports.records.id_names import IdNames
from popmq.reports.records.message_fields import Source
from popmq.reports.records.record_layout import RecordLayout
from popmq.reports.records.tables import SAMPLES
from popmq.reports.source.options import SourceOptions
from popmq.reports.source.ranges import Share

_NAMED = ("group", "topic", "read_topic", "client", "is_retry")


def read_share(options: SourceOptions, share: Share) -> Iterator[Any]:
    layouts = {
        layout.name: layout
        for layout in (
            RecordLayout.from_wire(pb.Layout.FromString(layout)) for layout in share.layouts
        )
    }
    skip = not options.fail_on_data_loss
    with ReportEndpoint(
        options.endpoint, patience_s=options.patience_s, skip_gone=skip
    ) as endpoint:
        names = _names(options, endpoint, share.broker)
        for span in share.ranges:
            end = 0 if span.table in SAMPLES else share.end_position
            source = Source(share.broker, span.topic, span.queue_id, names, end)
            for piece in endpoint.read(share.broker, span.to_wire(), epoch=share.epoch):
                yield record_batch(options.schema, layouts[span.layout], piece.data, source)


def _names(options: SourceOptions, endpoint: ReportEndpoint, broker: str) -> IdNames:
    if not any(name in _NAMED for name, _ in options.schema.columns):
        return IdNames()
    names = endpoint.names(partial=True).get(broker)
    if names is None:
        raise Unavailable(f"broker {broker} did not tell its names ({Code.HA_NOT_AVAILABLE})")
    return IdNames.from_wire(names)
