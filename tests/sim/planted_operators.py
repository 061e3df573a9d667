"""Mistakes planted into rejects, resets, redrives and auto-renew."""

from typing import Any

import pytest

from popmq.broker.core import record_applier
from popmq.broker.deliveries.check_point_table import CheckPointTable, DeliveryStatus
from popmq.broker.deliveries.client_liveness import ClientLiveness
from popmq.broker.deliveries.redriven_dead_letters import RedrivenDeadLetters
from popmq.broker.meta.offset_record import OffsetReason, OffsetRecord
from popmq.broker.operations.offset_reset import apply_offset
from popmq.broker.pop.ack_service import AckService
from popmq.broker.pop.revive_service import ReviveService

Patch = pytest.MonkeyPatch


def reject_written_twice(patch: Patch) -> None:
    """One dead letter more than there were rejects."""
    revive = ReviveService._revive_one

    def wrong(self: ReviveService, *results: Any) -> None:
        revive(self, *results)
        if len(results) == 6:  # with the reason of a reject
            revive(self, *results)

    patch.setattr(ReviveService, "_revive_one", wrong)


def reject_answered_and_not_done(patch: Patch) -> None:
    def wrong(self: AckService, *, topic: str, group: str, handle: bytes) -> None:
        self._receipt(topic, group, handle)

    patch.setattr(AckService, "reject", wrong)


def reset_leaves_what_is_in_flight(patch: Patch) -> None:
    """An old ack moves the offset that the reset set."""
    patch.setattr(CheckPointTable, "_open_at", lambda self, place, progress: [])


def handle_accepted_after_a_reset(patch: Patch) -> None:
    fate = CheckPointTable.fate

    def wrong(self: CheckPointTable, epoch: int, sequence: int, member: int) -> DeliveryStatus:
        delivery_status = fate(self, epoch, sequence, member)
        return DeliveryStatus.ACKED if delivery_status is DeliveryStatus.RESET else delivery_status

    patch.setattr(CheckPointTable, "fate", wrong)


def reset_forgotten_at_recovery(patch: Patch) -> None:
    def wrong(table: Any, record: OffsetRecord, log_ms: int, **more: Any) -> None:
        if record.reason is not OffsetReason.RESET:
            apply_offset(table, record, log_ms, **more)

    patch.setattr(record_applier, "apply_offset", wrong)


def redriven_twice(patch: Patch) -> None:
    patch.setattr(RedrivenDeadLetters, "has", lambda self, topic_id, offset: False)


def snapshot_forgets_what_was_redriven(patch: Patch) -> None:
    patch.setattr(RedrivenDeadLetters, "begin_snapshot", lambda self: iter(()))


def renewed_delivery_comes_back(patch: Patch) -> None:
    """The client lives, and loses what it holds."""
    patch.setattr(ReviveService, "_renews", lambda self, ck, now_ms: False)


def silent_client_keeps_its_deliveries(patch: Patch) -> None:
    patch.setattr(ClientLiveness, "is_alive", lambda self, client, now_ms: True)


def good_bye_ignored(patch: Patch) -> None:
    """What the client held comes back after the silence, and not at once."""
    patch.setattr(ReviveService, "release_deliveries", lambda self, client: 0)
