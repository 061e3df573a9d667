"""A broker core with a FIFO group `g` on topic `orders`, and short ways to use it."""

from popmq.broker.deliveries.queue_progress import FifoProgress
from popmq.common.errors import Code
from popmq.common.protocol.messaging_payloads import Delivery
from popmq.common.topics import GroupType, MessageType
from popmq.testing.harness.core_broker import CoreBroker


def made_core() -> CoreBroker:
    broker = CoreBroker()
    broker.topic("orders", type=MessageType.MIXED)
    broker.group("g", type=GroupType.FIFO)
    return broker


def send(core: CoreBroker, *names: str, queue_id: int = 0, tag: str = "") -> None:
    """Messages named by their key and number: `a1` is the first of message group `a`."""
    for name in names:
        key = name.rstrip("0123456789")
        core.send("orders", name.encode(), queue_id=queue_id, message_group=key, tag=tag)


def names(deliveries: list[Delivery]) -> list[str]:
    return [delivery.head.decode() for delivery in deliveries]


def attempts(deliveries: list[Delivery]) -> list[tuple[str, int]]:
    return [(delivery.head.decode(), delivery.attempt) for delivery in deliveries]


def receive(core: CoreBroker, *, limit: int = 32, invisible_ms: int = 60_000) -> list[Delivery]:
    return core.receive("orders", "g", limit=limit, invisible_ms=invisible_ms)


def ack(core: CoreBroker, *deliveries: Delivery) -> None:
    results = core.ack("orders", "g", *(delivery.handle for delivery in deliveries))
    assert [result.code for result in results] == [Code.OK] * len(deliveries)


def progress(core: CoreBroker, queue_id: int = 0, group: str = "g") -> FifoProgress:
    topic, config = core.broker.registry.topic("orders"), core.broker.registry.group(group)
    found_progress = core.broker.table.progress(config.id, topic.id, queue_id)
    assert isinstance(found_progress, FifoProgress)
    return found_progress


def restart(core: CoreBroker) -> None:
    """After a power cut: what was not synced is gone."""
    core.disk.restore_power()  # type: ignore[attr-defined]
    core.start()
