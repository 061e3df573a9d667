"""A snapshot of the check-point table is of the moment of its begin, whatever is removed later."""

from collections.abc import Callable

import pytest

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.ended_check_points import Key
from popmq.broker.deliveries.queue_progress import GroupQueue
from popmq.testing.harness.core_broker import CoreBroker

REMOVALS: dict[str, Callable[[CheckPointTable, int, int], object]] = {
    "topic": lambda table, topic_id, group_id: table.drop_topic(topic_id),
    "group": lambda table, topic_id, group_id: table.drop_group(group_id),
    "queue": lambda table, topic_id, group_id: table.drop_queue(topic_id, 0, [group_id]),
    "reset": lambda table, topic_id, group_id: table.reset(group_id, topic_id, 0, 9, 1_000),
}


def restored(pieces: list[bytes]) -> CheckPointTable:
    table = CheckPointTable()
    for piece in pieces:
        table.restore(piece)
    table.restored()
    return table


def facts(table: CheckPointTable) -> tuple[dict[Key, object], dict[GroupQueue, object], int]:
    live: dict[Key, object] = {ck.key: (ck.place, ck.acked, ck.revived) for ck in table}
    progress: dict[GroupQueue, object] = {
        place: (it.committed, it.cursor) for place, it in table.progress_items()
    }
    return live, progress, table.in_flight


@pytest.mark.parametrize("removal", REMOVALS)
@pytest.mark.parametrize("pieces_before", [0, 1])
def test_what_is_removed_after_the_begin_is_in_the_snapshot(
    removal: str, pieces_before: int
) -> None:
    core = CoreBroker()
    core.topic("orders", queues=2)
    core.group("workers")
    for number in range(10):
        core.send("orders", b"%d" % number, queue_id=number % 2)
    deliveries = [*core.receive("orders", "workers"), *core.receive("orders", "workers")]
    core.ack("orders", "workers", deliveries[0].handle)
    table = core.broker.deliveries.table
    before = facts(table)
    assert len(before[0]) == 2, "one check point in each queue"
    topic_id, group_id = next((ck.topic_id, ck.group_id) for ck in table)

    pieces = table.begin_snapshot()
    taken = [content for content, _ in (next(pieces) for _ in range(pieces_before))]
    REMOVALS[removal](table, topic_id, group_id)
    assert facts(table) != before
    taken += [content for content, _ in pieces]

    assert facts(restored(taken)) == before
