"""What pops came to, counted since the broker started."""

from dataclasses import dataclass


@dataclass(slots=True)
class PopMetrics:
    pops: int = 0
    empty_pops: int = 0
    delivered: int = 0
    refused_in_flight: int = 0
    cold_pops: int = 0  # had to wait for the disk
    expired: int = 0  # went by retention, or by their deadline, before this group read them
    filtered: int = 0  # passed over because no receive wanted them

    def passed_over(self, unwanted: int, expired: int) -> None:
        self.filtered += unwanted
        self.expired += expired
