"""Topics and groups that are deleted and made again under load, two broker groups, two proxies."""

from pathlib import Path

import pytest
from e2e.many import Many
from e2e.recreation import OURS, Recreation

SEED = 20_261_123
SETTINGS = {"POPMQ_TOPIC_AUTO_CREATE": "false", "POPMQ_GROUP_AUTO_CREATE": "false"}


@pytest.mark.more
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lives", [3, pytest.param(50, marks=pytest.mark.long)])
def test_nothing_acknowledged_after_a_creation_is_lost_or_forgotten(
    tmp_path: Path, lives: int
) -> None:
    with Many(tmp_path, "--groups", "2", "--workers", "2", settings=SETTINGS) as many:
        recreation = Recreation(many.ready.endpoint, SEED)
        recreation.run(lives)
    ledger = recreation.ledger
    print(
        f"\nseed {SEED}: {lives} lives, {len(ledger.sent)} sent, {len(ledger.received)} received, "
        f"{len(ledger.acked)} acked, refusals {dict(ledger.codes)}; lost {len(recreation.lost)}, "
        f"repeated {len(ledger.repeated())}, without a topic {len(ledger.sent_without_a_topic())}"
    )
    assert recreation.lost == []
    assert ledger.repeated() == []
    assert ledger.sent_without_a_topic() == []
    assert not [code for code in ledger.codes if code >= OURS]
