"""A master that is named master once more, while it leads."""

from dataclasses import replace

from ha.node_rig import GROUP, Rig


def test_it_leads_the_new_epoch() -> None:
    """A second controller took it for lost, and wrote the record before it was heard again."""
    rig = Rig()
    rig.ready()
    rig.make_topic()
    rig.advance(100)
    assert rig.send(b"one").error is None
    old = rig.master
    controller = rig.controller
    assert controller is not None
    group = controller.groups[GROUP]
    record = group.record
    assert record is not None
    again = replace(record, epoch=record.epoch + 1, version=record.version + 1)
    group.records.write(record.version, again, lambda result: None)
    rig.until(lambda: old.node.identity.epoch == again.epoch)
    rig.ready()
    assert rig.master is old
    assert old.node.master_role is not None
    assert old.node.master_role.epoch == again.epoch
    answer = rig.send(b"two")
    rig.until(lambda: answer.heard)
    assert answer.error is None
    rig.until(lambda: all(node.log() == old.log() for node in rig.nodes))
