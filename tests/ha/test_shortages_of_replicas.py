"""A replica that has no descriptor for its small files: it stays what it is, and says so."""

import errno
import os
from dataclasses import replace

from ha.node_rig import GROUP, Rig

from popmq.testing.disk.lying_disk import LyingFile


def test_a_broker_that_cannot_accept_an_epoch_says_so_and_accepts_it_later() -> None:
    rig = Rig()
    rig.ready()
    controller = rig.controller
    assert controller is not None
    group = controller.groups[GROUP]
    short = next(node for node in rig.nodes if node is not rig.master)
    before = short.node.identity.epoch
    open_file = short.disk.open

    def without_descriptors(path: str, *, create: bool = False) -> LyingFile:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    short.node.identity.file.close()
    short.disk.open = without_descriptors  # type: ignore[method-assign]
    record = group.record
    assert record is not None
    again = replace(record, epoch=record.epoch + 1, version=record.version + 1)
    group.records.write(record.version, again, lambda result: None)

    def shortages() -> list[str]:
        return [member.shortage for member in group.state().members if member.shortage]

    rig.until(lambda: shortages() == ["[Errno 24] Too many open files"])
    assert short.node.identity.epoch == before
    assert not short.failures
    short.disk.open = open_file  # type: ignore[method-assign]
    rig.until(lambda: short.node.identity.epoch == again.epoch)
    rig.until(lambda: not shortages())
    rig.ready()
