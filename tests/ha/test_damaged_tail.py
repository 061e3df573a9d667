"""A slave whose log is damaged below its end: nobody counts on what it vouched for any more."""

import pytest
from ha.node_rig import Node, Rig

BODY = bytes(400)


@pytest.fixture
def rig() -> Rig:
    created = Rig("abc")
    created.ready()
    created.make_topic()
    for _ in range(30):  # each record says that those before it are confirmed
        answer = created.send(BODY)
        created.until(lambda answer=answer: answer.heard)  # type: ignore[misc]
    created.advance(100)
    return created


def slave(rig: Rig) -> Node:
    return next(node for node in rig.nodes if node is not rig.master)


def members(rig: Rig) -> frozenset[str]:
    leadership = rig.master.node.master_role if rig.masters else None
    return leadership.replication_server.sync.members if leadership is not None else frozenset()


def overwrite(node: Node, position: int, data: bytes) -> None:
    (segment,) = node.disk.names("data/commitlog")[:1]
    file = node.disk.open(f"data/commitlog/{segment}")
    file.write(data, position - int(segment))
    file.sync()


def test_what_a_store_vouched_for_and_lost_takes_it_out_of_the_set(rig: Rig) -> None:
    broken, store_id = slave(rig), slave(rig).node.identity.store_id
    end = broken.end
    broken.kill()
    overwrite(broken, end - 3_000, b"\x55" * 50)
    broken.start()
    assert broken.end < end - 2_500, "the damage is not what it was meant to be"
    renewed = broken.node.identity.store_id
    assert renewed != store_id
    rig.until(lambda: renewed in members(rig) and store_id not in members(rig))
    assert broken.log() == rig.master.log()


def test_it_is_not_elected_although_it_was_in_the_set(rig: Rig) -> None:
    broken = slave(rig)
    for node in rig.nodes:
        node.kill()
    overwrite(broken, broken.end - 3_000, b"\x55" * 50)
    for node in rig.nodes:
        if node is not broken:
            node.disk.restore_power()
    broken.start()
    rig.advance(10_000)
    assert not rig.masters
    for node in rig.nodes:
        if node is not broken:
            node.start()
    assert rig.ready(members=2) is not broken
    rig.until(lambda: broken.node.identity.store_id in members(rig))
    assert broken.log() == rig.master.log()


def test_a_torn_tail_is_no_damage(rig: Rig) -> None:
    torn, store_id = slave(rig), slave(rig).node.identity.store_id
    torn.kill()
    overwrite(torn, torn.end - 100, b"\x55" * 100)
    torn.start()
    assert torn.node.identity.store_id == store_id
    rig.until(lambda: torn.log() == rig.master.log())
