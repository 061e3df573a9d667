"""What the proxy counts; plain integers, turned into metrics by whoever serves /metrics."""

from collections import Counter
from dataclasses import dataclass, field

from popmq.common.errors import PopmqError


@dataclass(slots=True)
class ProxyMetrics:
    """`waiting_receives` and `open_streams` go up and down; everything else only up."""

    sends: int = 0  # messages stored
    receives: int = 0  # ReceiveMessage calls
    received: int = 0  # messages handed to clients
    acks: int = 0  # entries answered OK
    changes: int = 0  # invisible times changed
    refused: Counter[int] = field(default_factory=Counter)  # by code
    transaction_checks: int = 0  # handed to producers
    open_streams: int = 0  # Telemetry
    waiting_receives: int = 0

    def refuse(self, error: PopmqError) -> None:
        self.refused[int(error.code)] += 1
