"""How far a history has each table of each broker group.

`moments.json` is written when all tables of one `popmq report history` are there. Until then a
table may have more than the others; reports read all of theirs up to the same moment.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from popmq.common.wire import report_pb2 as pb
from popmq.reports.atomic_file import write_json
from popmq.reports.report import BrokerMoment

_FILE = "moments.json"


def moment_of(tables: pb.BrokerTables) -> BrokerMoment:
    return BrokerMoment(
        tables.broker,
        tables.epoch,
        tables.end_position,
        tables.wall_ms,
        tables.log_ms,
        tables.sample,
        tables.failing_percent,
        tables.failing_least,
    )


@dataclass(slots=True)
class HistoryProgress:
    """By table and broker group. One process at a time writes."""

    folder: Path
    known: dict[str, dict[str, BrokerMoment]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> "HistoryProgress":
        """None are known where nothing was ever appended."""
        path = folder / _FILE
        document = json.loads(path.read_text()) if path.exists() else {}
        return cls(
            folder,
            {
                table: {broker: BrokerMoment(**fields) for broker, fields in brokers.items()}
                for table, brokers in document.items()
            },
        )

    def add(self, tables: Sequence[str], brokers: Sequence[pb.BrokerTables]) -> None:
        """These are there up to now; a broker group that did not answer stays where it was."""
        for table in tables:
            self.known.setdefault(table, {}).update(
                (broker.broker, moment_of(broker)) for broker in brokers
            )
        fields = {
            table: {broker: asdict(moment) for broker, moment in broker_moments.items()}
            for table, broker_moments in self.known.items()
        }
        write_json(self.folder / _FILE, fields)

    def shared(self, tables: Sequence[str]) -> tuple[BrokerMoment, ...]:
        """Of each broker group that all of them have, the earliest."""
        each = [self.known.get(table, {}) for table in tables]
        brokers = sorted(set.intersection(*map(set, each)))
        return tuple(
            min((broker_moments[broker] for broker_moments in each), key=_order)
            for broker in brokers
        )


def _order(moment: BrokerMoment) -> tuple[int, int, int]:
    return moment.epoch, moment.end_position, moment.sample
