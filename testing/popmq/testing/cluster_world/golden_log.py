"""The golden log: what any broker of a group ever called confirmed, byte for byte.

Whoever confirms other bytes at a place that is in it, or leads an epoch that another has confirmed
something in, broke a rule; what is in it and in no log at the end is lost.
"""

from collections.abc import Callable

from popmq.testing.cluster_world.broker import DATA, ClusterBroker
from popmq.testing.disk.sim_disk import SimDisk

_FOLDER = f"{DATA}/commitlog/"


class GoldenLog:
    def __init__(self, complain: Callable[[str, str], None]) -> None:
        self.data = bytearray()
        self._complain = complain
        self._masters: dict[int, str] = {}  # epoch -> store id
        self._seen: dict[str, tuple[int, object, int]] = {}  # host -> life, broker, checked

    def look(self, broker: ClusterBroker) -> bool:
        """What it confirmed since the last look; True if there was something."""
        node = broker.node
        assert node is not None
        store = node.broker.store
        life, life_of, checked = self._seen.get(broker.name, (0, None, 0))
        if (life, life_of) != (broker.host.life, node.broker):
            checked = 0
        leads = node.master_role is not None
        position = store.confirmed if leads else min(store.confirmed, store.durable)
        if position <= checked:
            self._seen[broker.name] = (broker.host.life, node.broker, checked)
            return False
        self._seen[broker.name] = (broker.host.life, node.broker, position)
        self._compare(broker, max(checked, store.start), position, leads=leads)
        if leads and node.master_role is not None:
            epoch = node.master_role.epoch
            other = self._masters.setdefault(epoch, node.identity.store_id)
            if other != node.identity.store_id:
                self._complain("I10 one-master", f"two stores confirmed in epoch {epoch}")
        return True

    def _compare(self, broker: ClusterBroker, start: int, end: int, *, leads: bool) -> None:
        found_log_bytes = log_bytes(broker.disk, start, end)
        if len(found_log_bytes) < end - start:
            self._complain(
                "log", f"{broker.name}: {len(found_log_bytes)} of {end - start} bytes at {start}"
            )
            return
        known = min(end, len(self.data))
        if start < known and found_log_bytes[: known - start] != self.data[start:known]:
            at = next(
                at for at in range(start, known) if found_log_bytes[at - start] != self.data[at]
            )
            what = f"{broker.name} confirmed other bytes at {at} of {len(self.data)}"
            self._complain("confirmed-replaced", what)
        elif end > known and leads and start <= known:
            self.data += found_log_bytes[known - start :]
        elif end > known:
            self._complain("I10 one-master", f"{broker.name} confirmed {end}, no master did")


def log_bytes(disk: SimDisk, start: int, end: int) -> bytes:
    """What programs see of the log between two positions, without an operation of the disk."""
    data = bytearray()
    for path, content in sorted(disk.contents(_FOLDER)):
        first = int(path[len(_FOLDER) :])
        last = first + len(content)
        if first < end and last > start:
            data += content[max(0, start - first) : end - first]
    return bytes(data)
