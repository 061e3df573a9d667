"""Different messages with the same id: each that was OK is delivered, in every world."""

import pytest
from sim_seeds import Run, breaks

from popmq.broker.meta.send_deduplication import SendDeduplication, key_of
from popmq.testing.cluster_world.run import run_cluster_seed
from popmq.testing.sim.equal_ids import FIRST_SEED
from popmq.testing.simulator import run_seed, run_timer_seed, run_transaction_seed

pytestmark = pytest.mark.more

SEEDS = 10
WORLDS = [run_seed, run_timer_seed, run_transaction_seed, run_cluster_seed]


def id_alone_decides(patch: pytest.MonkeyPatch) -> None:
    def knows(table: SendDeduplication, key: bytes, fingerprint: int) -> bool:
        return table._receipts.get(key, -1) >= 0

    find = SendDeduplication.find

    def find_by_id(
        table: SendDeduplication, topic_id: int, message_id: str, fingerprint: int = 0
    ) -> object:
        packed = table._receipts.get(key_of(topic_id, message_id.encode()), -1)
        known = packed >> 160 & (1 << 64) - 1 if packed >= 0 else fingerprint
        return find(table, topic_id, message_id, known)

    patch.setattr(SendDeduplication, "knows", knows)
    patch.setattr(SendDeduplication, "find", find_by_id)


@pytest.mark.parametrize("run", WORLDS)
def test_a_broker_that_tells_resends_by_their_ids_alone_is_seen(run: Run) -> None:
    seeds = range(FIRST_SEED, FIRST_SEED + SEEDS)
    assert any(breaks(id_alone_decides, run, seed) for seed in seeds)
