"""What a report says of a history that it must not trust."""

from pathlib import Path

import pytest

from popmq.common.errors import Refused

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]


def test_a_history_that_never_became_complete_is_refused_instead_of_looking_empty(
    tmp_path: Path,
) -> None:
    """The first `popmq report history` died between two tables."""
    (tmp_path / "offsets" / "new-0").mkdir(parents=True)
    # The everyday tests collect this file too, and know no Arrow.
    from popmq.reports.inputs import HistoryInputs

    with pytest.raises(Refused, match="no history of offsets, timers that is complete"):
        HistoryInputs(None, str(tmp_path), ("offsets", "timers"))
