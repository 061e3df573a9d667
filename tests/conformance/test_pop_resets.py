"""Resets while pops, acks and changes run, in groups of every kind: the last one counts."""

import random
from typing import cast

import pytest

from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.topics import CheckPoints, GroupType, MessageType
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import CoreBroker

KINDS = [
    (GroupType.NORMAL, CheckPoints.DURABLE),
    (GroupType.NORMAL, CheckPoints.BUFFERED),
    (GroupType.FIFO, CheckPoints.DURABLE),
]


def reset(core: CoreBroker, offset: int) -> None:
    request = pb.ResetOffsetRequest(group="g", topic="orders", queue_id=0, offset=offset)
    core.reply(Kind.RESET_OFFSET, request.SerializeToString())


def number(delivery: Delivery) -> int:
    return int(delivery.head[1:])


def live(core: CoreBroker, rng: random.Random, held: list[Delivery], events: int) -> None:
    """Random pops, acks, changes, waits and resets; nothing runs out of its invisible time."""
    count = core.broker.store.queue(core.broker.registry.topic("orders").id, 0).count
    for _ in range(events):
        match rng.randrange(6):
            case 0 | 1:
                held += core.receive("orders", "g", limit=rng.randrange(1, 9))
            case 2 if held:
                core.ack("orders", "g", rng.choice(held).handle)
            case 3 if held:
                change = hop.ChangeRequest("orders", "g", rng.choice(held).handle, 900_000)
                core.ask(Kind.CHANGE, hop.encode_change(change))
            case 4:
                reset(core, rng.randint(0, count))
            case _:
                core.advance(500)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("type", "check_points"), KINDS)
def test_after_the_last_of_many_resets_the_group_reads_from_there_whatever_ran_beside(
    type: GroupType, check_points: CheckPoints, cut: bool
) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        core = CoreBroker(disk=LyingDisk(), seed=seed)
        core.topic("orders", queues=1, type=MessageType.MIXED)
        core.group("g", type=type, check_points=check_points)
        for at in range(40):
            key = rng.choice("abc")
            core.send("orders", f"{key}{at:02}".encode(), message_group=key)
        held: list[Delivery] = []
        live(core, rng, held, 60)
        last = rng.randint(0, 40)
        reset(core, last)
        for old in held:
            core.ack("orders", "g", old.handle)  # of deliveries that the reset ended
        if cut:
            cast(LyingDisk, core.disk).restore_power()
            core.start()
        got: list[Delivery] = []
        while more := core.receive("orders", "g", limit=rng.randrange(1, 9)):
            got += more
            results = core.ack("orders", "g", *(delivery.handle for delivery in more))
            assert {result.code for result in results} == {Code.OK}, seed
        assert sorted(map(number, got)) == list(range(last, 40)), (seed, last)
        for key in "abc" if type is GroupType.FIFO else "":
            of_key = [
                number(delivery) for delivery in got if delivery.head.startswith(key.encode())
            ]
            assert of_key == sorted(of_key), (seed, key)
        core.advance(3_600_000)
        assert core.receive("orders", "g") == [], seed
