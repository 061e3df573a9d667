"""The section `replication` of the settings (docs/concepts/replication.md)."""

from dataclasses import dataclass

from popmq.common.quantities import GIB, KIB, MIB
from popmq.common.settings.section import SettingsSection, constant, within

MOST_REPLICAS = 9


@dataclass(frozen=True, slots=True)
class ReplicationSettings(SettingsSection):
    """`replicas` of a broker group are this one and others with the same `broker.name`."""

    replicas: int = within(1, 1, MOST_REPLICAS)
    # Replicas that have to be in the SyncStateSet for anything to be confirmed; 0: all but one.
    min_in_sync: int = within(0, 0, MOST_REPLICAS)
    priority: int = within(0, -1_000, 1_000)  # of equal candidates the smallest is elected
    laggard_ms: int = within(1500, 10, 600_000)
    hand_over_ms: int = constant(1000)
    fetch_bytes: int = within(MIB, 4 * KIB, GIB)
    fetch_wait_ms: int = constant(500)
    catch_up_bytes_per_second: int = within(0, 0, 1 << 60)  # 0: no limit
    epochs: int = constant(1000)  # entries of the EpochFile

    def relations(self) -> None:
        if self.min_in_sync > self.replicas:
            raise self.refuse("min_in_sync", f"at most replication.replicas = {self.replicas}")

    @property
    def is_single(self) -> bool:
        """The group has this one broker: nobody elects it, nothing is copied."""
        return self.replicas == 1

    @property
    def effective_min_in_sync(self) -> int:
        return self.min_in_sync or max(1, self.replicas - 1)
