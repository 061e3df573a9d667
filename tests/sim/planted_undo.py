"""Mistakes planted into receives whose client left (pop/pop_rollback.py)."""

from typing import Any

import pytest

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.pop_check_point import EndRecord, PopCheckPoint, ReviveRecord
from popmq.broker.pop.pop_rollback import PopRollback
from popmq.broker.pop.revive_service import ReviveService

Patch = pytest.MonkeyPatch


def undone_attempt_counted(patch: Patch) -> None:
    revive = ReviveService._revive_one

    def wrong(self: ReviveService, ck: PopCheckPoint, *more: Any) -> None:
        undone, ck.rolled_back = ck.rolled_back, False
        revive(self, ck, *more)
        ck.rolled_back = undone

    patch.setattr(ReviveService, "_revive_one", wrong)


def undone_fifo_attempt_counted(patch: Patch) -> None:
    """Each start forgets that nobody saw it, and so does the running broker."""
    apply = CheckPointTable.apply

    def wrong(self: CheckPointTable, record: ReviveRecord, log_ms: int) -> None:
        counted = record._replace(counted=True) if isinstance(record, EndRecord) else record
        apply(self, counted, log_ms)

    patch.setattr(CheckPointTable, "apply", wrong)


def last_attempt_dies_unseen(patch: Patch) -> None:
    """It keeps its number, and becomes a dead letter all the same."""
    revive = ReviveService._revive_one

    def wrong(self: ReviveService, ck: PopCheckPoint, member: int, *more: Any) -> None:
        _, group, message = more[:3]
        attempt = message.attempt + self._table.attempts_before(ck, member)
        undone = ck.rolled_back
        ck.rolled_back = undone and attempt < group.max_attempts
        revive(self, ck, member, *more)
        ck.rolled_back = undone

    patch.setattr(ReviveService, "_revive_one", wrong)


def cancel_ignored(patch: Patch) -> None:
    def wrong(self: PopRollback, number: int) -> bool:
        return self._leaving.pop(number, None) is not None

    patch.setattr(PopRollback, "cancel", wrong)


def crossed_answer_not_undone(patch: Patch) -> None:
    cancel = PopRollback.cancel

    def wrong(self: PopRollback, number: int) -> bool:
        self._left.clear()
        return cancel(self, number)

    patch.setattr(PopRollback, "cancel", wrong)
