"""Broker groups that have not registered since the controllers started: routes name them."""

from controller.controller_rig import DEAD_MS, HEARTBEAT_MS, Broker, Rig, ask

from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import controller_pb2 as pb
from popmq.controller.controller import Controller
from popmq.controller.known_groups import KEY
from popmq.controller.metadata_store import (
    MemoryStore,
    MetadataStoreUnavailable,
    OnRead,
    OnSwapped,
    WriteOutcome,
    WriteResult,
)


class ShakyStore(MemoryStore):
    """Answers nothing while `down`; the answer to the first write of the groups is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.down = True
        self.loses = True

    def read(self, key: str, then: OnRead) -> None:
        if self.down:
            then(MetadataStoreUnavailable("no answer"))
        else:
            super().read(key, then)

    def swap(self, key: str, expected_version: int, record: GroupRecord, then: OnSwapped) -> None:
        if self.loses and key == KEY:
            self.loses = False
            super().swap(key, expected_version, record, lambda result: None)
            then(WriteResult(WriteOutcome.UNKNOWN, None, "no answer"))
        else:
            super().swap(key, expected_version, record, then)


def single(name: str, *, owner: str = "") -> Broker:
    changes = 0 if owner else 1
    return Broker(
        name, group=name, replicas=1, epoch=1, role=pb.MASTER, owner=owner, changes=changes
    )


def routes(controller: Controller) -> pb.RoutesReply:
    body = pb.RoutesRequest().SerializeToString()
    return pb.RoutesReply.FromString(ask(controller, Kind.ROUTES, body))


def test_a_restarted_controller_names_the_groups_that_have_not_registered_yet() -> None:
    rig = Rig(single("a"), single("b", owner="a"), single("c", owner="a"))
    rig.run(2 * HEARTBEAT_MS)
    assert list(routes(rig.controllers[0]).absent) == []
    rig.controllers[:] = [rig.controller()]
    for absent in ("b", "c"):
        rig.broker(absent).up = False
    rig.run(2 * HEARTBEAT_MS)
    before = routes(rig.controllers[0])
    assert (before.owner, list(before.absent)) == ("a", ["b", "c"])
    rig.broker("c").up = True
    rig.run(HEARTBEAT_MS)
    again = routes(rig.controllers[0])
    assert list(again.absent) == ["b"]
    assert again.version > before.version


def test_a_group_without_a_master_is_absent_though_its_slaves_are_heard() -> None:
    rig = Rig(Broker("node-a"), Broker("node-b"), Broker("node-c"))
    rig.run(2 * DEAD_MS)
    rig.controllers[:] = [rig.controller()]
    leader = rig.broker(rig.leader)
    leader.up = False
    rig.step()
    rig.beat()
    rig.step()
    assert list(routes(rig.controllers[0]).absent) == ["broker-a"]
    rig.run(2 * DEAD_MS)
    assert list(routes(rig.controllers[0]).absent) == []


def test_a_group_that_was_drained_and_taken_away_is_not_absent() -> None:
    rig = Rig(single("a"), single("b", owner="a"))
    rig.run(2 * HEARTBEAT_MS)
    rig.broker("b").draining = True
    rig.run(HEARTBEAT_MS)
    rig.broker("b").up = False
    rig.run(2 * DEAD_MS)
    rig.controllers[:] = [rig.controller()]
    rig.run(2 * HEARTBEAT_MS)
    assert list(routes(rig.controllers[0]).absent) == []


def test_two_controllers_keep_one_list_of_what_each_of_them_has_heard() -> None:
    rig = Rig(single("a"), single("b", owner="a"), single("c", owner="a"), controllers=2)
    rig.deaf = {(0, "b"), (1, "c")}
    rig.run(2 * HEARTBEAT_MS)
    rig.controllers[:] = [rig.controller()]
    rig.brokers = [rig.broker("a")]
    rig.deaf = set()
    rig.run(2 * HEARTBEAT_MS)
    assert list(routes(rig.controllers[0]).absent) == ["b", "c"]


def test_no_owner_is_named_before_the_absent_groups_are_known_and_lost_answers_lose_no_name() -> (
    None
):
    store = ShakyStore()
    rig = Rig(single("a"), single("b", owner="a"), store=store)
    rig.run(2 * DEAD_MS)
    assert routes(rig.controllers[0]).owner == ""
    store.down = False
    rig.run(2 * DEAD_MS)
    assert routes(rig.controllers[0]).owner == "a"
    assert not store.loses
    rig.controllers[:] = [rig.controller()]
    rig.broker("b").up = False
    rig.run(2 * HEARTBEAT_MS)
    assert list(routes(rig.controllers[0]).absent) == ["b"]
