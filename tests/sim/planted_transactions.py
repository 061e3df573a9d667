"""Mistakes planted into transactions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from popmq.broker.core.record_applier import RecordApplier
from popmq.broker.handlers.request_runner import RequestRunner
from popmq.broker.transaction.half_bodies import HalfBodies
from popmq.broker.transaction.half_service import HalfService
from popmq.broker.transaction.transaction_table import TransactionTable
from popmq.broker.transaction.transactions import Transactions
from popmq.common import topics
from popmq.common.record.transaction_token import TransactionEnd, TransactionEndToken

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class PlantedTransaction:
    name: str
    plant: Callable[[Patch], None]
    seeds: int = 40


def ops_ignored_at_recovery(patch: Patch) -> None:
    patch.setattr(Transactions, "apply_op", lambda *_: None)


def commits_ignored_at_recovery(patch: Patch) -> None:
    apply = RecordApplier._apply_message

    def wrong(self: RecordApplier, record: Any) -> None:
        before = TransactionTable.apply
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(TransactionTable, "apply", lambda *_: None)
            apply(self, record)
        assert TransactionTable.apply is before

    patch.setattr(RecordApplier, "_apply_message", wrong)


def commit_leaves_it_pending(patch: Patch) -> None:
    apply = TransactionTable.apply

    def wrong(self: TransactionTable, token: TransactionEndToken, log_ms: int) -> None:
        half = self.pending.get(token.half_offset)
        apply(self, token, log_ms)
        if token.ending is TransactionEnd.COMMITTED and half is not None:
            self.pending[half.offset] = half

    patch.setattr(TransactionTable, "apply", wrong)


def check_not_logged(patch: Patch) -> None:
    write = HalfService.write_op

    def wrong(self: HalfService, half: Any, ending: TransactionEnd, checks: int = 0) -> None:
        if ending is TransactionEnd.CHECKED:
            token = TransactionEndToken(ending, half.topic_id, half.offset, checks)
            self._table.apply(token, self._store.log_ms())
        else:
            write(self, half, ending, checks)

    patch.setattr(HalfService, "write_op", wrong)


def checks_not_counted_in_snapshots(patch: Patch) -> None:
    restored = TransactionTable.restored

    def wrong(self: TransactionTable) -> None:
        for half in list(self.pending.values()):
            self.pending[half.offset] = half._replace(checks=0)
        restored(self)

    patch.setattr(TransactionTable, "restored", wrong)


def endings_not_restored(patch: Patch) -> None:
    restored = TransactionTable.restored

    def wrong(self: TransactionTable) -> None:
        self._endings.clear()
        self._ended.clear()
        restored(self)

    patch.setattr(TransactionTable, "restored", wrong)


def retention_leaves_half_messages(patch: Patch) -> None:
    patch.setattr(HalfBodies, "bodies_below", lambda *_: iter(()))


def moved_place_forgotten_at_recovery(patch: Patch) -> None:
    moved = RecordApplier.moved

    def wrong(self: RecordApplier, body: Any) -> None:
        if body.topic_id != topics.HALF_TOPIC_ID:
            moved(self, body)

    patch.setattr(RecordApplier, "moved", wrong)


def end_answered_before_it_is_durable(patch: Patch) -> None:
    turn = RequestRunner._turn

    def wrong(self: RequestRunner, job: Any, on_reply: Any) -> None:
        store = self._store
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(store, "when_log_confirmed", lambda callback: callback())
            turn(self, job, on_reply)

    patch.setattr(RequestRunner, "_turn", wrong)


def half_message_in_its_topic(patch: Patch) -> None:
    put = HalfService.put

    def wrong(self: HalfService, topic: Any, queue_id: int, entry: Any, stamp: Any) -> Any:
        self._store.put_message(
            topic_id=topic.id, queue_id=queue_id, head=entry.head, properties=entry.properties
        )
        return put(self, topic, queue_id, entry, self._store.stamp())

    patch.setattr(HalfService, "put", wrong)


def given_up_too_late(patch: Patch) -> None:
    wrong = HalfService.give_up
    patch.setattr(
        HalfService,
        "give_up",
        lambda self, half: wrong(self, half) if half.checks > 50 else None,
    )


def id_of_another_message_accepted(patch: Patch) -> None:
    from popmq.common.record import transaction_id

    def wrong(_key: bytes, _plain: bytes, _message_id: str) -> bytes:
        return bytes(16)

    patch.setattr(transaction_id, "_signature", wrong)


PLANTED_TRANSACTIONS = [
    PlantedTransaction("ops ignored at recovery", ops_ignored_at_recovery),
    PlantedTransaction("commits ignored at recovery", commits_ignored_at_recovery),
    PlantedTransaction("commit leaves it pending", commit_leaves_it_pending),
    PlantedTransaction("check not logged", check_not_logged),
    PlantedTransaction("checks not counted in snapshots", checks_not_counted_in_snapshots),
    PlantedTransaction("endings not restored", endings_not_restored),
    PlantedTransaction("retention leaves half messages", retention_leaves_half_messages, 60),
    PlantedTransaction("moved place forgotten at recovery", moved_place_forgotten_at_recovery, 90),
    PlantedTransaction("end answered too early", end_answered_before_it_is_durable, 90),
    PlantedTransaction("half message in its topic", half_message_in_its_topic),
    PlantedTransaction("given up too late", given_up_too_late),
    PlantedTransaction("id of another message accepted", id_of_another_message_accepted),
]
