"""What a broker says to its controllers, and whom it believes."""

from popmq.broker.ha.controller_clients import ControllerClients
from popmq.broker.ha.role import GroupView
from popmq.broker.ha.sync_state import AlterSyncStateSet
from popmq.common.errors import PopmqError, Unavailable
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.wire import controller_pb2 as pb
from popmq.testing.harness.clock import ManualClock

RECORD = pb.GroupRecord(leader="a", epoch=2, sync_state_set=["a", "b"], version=7)


class OneController:
    """Answers what the test tells it to; `None`: nothing, ever."""

    def __init__(self) -> None:
        self.asked: list[Kind] = []
        self.alter: bytes | PopmqError | None = None
        self.away = False

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self.asked.append(kind)
        if self.away:
            on_reply(Unavailable("nobody there"))
        elif kind is Kind.REGISTER:
            state = pb.GroupState(record=RECORD)
            on_reply(pb.RegisterReply(heartbeat_ms=500, state=state).SerializeToString())
        elif kind is Kind.ALTER_SYNC_STATE_SET and self.alter is not None:
            on_reply(self.alter)
        return len(self.asked)

    def cancel(self, request_id: int) -> None:
        return


class Broker:
    def __init__(self, count: int = 2) -> None:
        self.clock = ManualClock()
        self.all = [OneController() for _ in range(count)]
        self.views: list[GroupView] = []
        self.records: list[GroupRecord] = []
        self.controllers = ControllerClients(
            self.all,
            self,
            cluster="popmq",
            group="group-a",
            heartbeat_ms=200,
            watches=True,
            now_ms=self.clock.boot_ms,
        )

    @property
    def store_id(self) -> str:
        return "a"

    def registration(self) -> bytes:
        return b""

    def on_view(self, view: GroupView) -> None:
        self.views.append(view)

    def on_record(self, record: GroupRecord) -> None:
        self.records.append(record)

    def on_cluster(self, reply: pb.RegisterReply) -> None:
        return

    def run(self, ms: int) -> None:
        for _ in range(ms // 10):
            self.clock.advance(10)
            self.controllers.step()


def beats(controller: OneController) -> int:
    return controller.asked.count(Kind.REGISTER)


def test_every_controller_gets_heartbeats_as_often_as_it_says() -> None:
    broker = Broker()
    broker.run(1_000)
    before = [beats(controller) for controller in broker.all]
    broker.run(5_000)
    assert [beats(controller) for controller in broker.all] == [count + 10 for count in before]
    assert broker.views[-1].record == GroupRecord("a", 2, ("a", "b"), 7)


def test_a_change_of_roles_is_told_at_once() -> None:
    broker = Broker(count=1)
    broker.run(100)
    before = beats(broker.all[0])
    broker.controllers.heartbeat_now()
    broker.run(10)
    assert beats(broker.all[0]) == before + 1


def test_one_watch_is_open_at_each_controller() -> None:
    broker = Broker()
    broker.run(3_000)
    assert [controller.asked.count(Kind.WATCH_GROUP) for controller in broker.all] == [1, 1]


def test_a_controller_is_reachable_while_one_answered_lately() -> None:
    broker = Broker()
    assert not broker.controllers.reachable
    broker.run(100)
    assert broker.controllers.reachable
    broker.all[0].away = True
    broker.run(5_000)
    assert broker.controllers.reachable
    broker.all[1].away = True
    broker.run(2_000)
    assert broker.controllers.reachable
    broker.run(2_000)
    assert not broker.controllers.reachable


def test_a_request_for_another_set_goes_to_the_next_one_when_one_does_not_know() -> None:
    unknown = pb.AlterSyncStateSetReply(outcome=pb.AlterSyncStateSetReply.UNKNOWN)
    written = pb.AlterSyncStateSetReply(outcome=pb.AlterSyncStateSetReply.WRITTEN, record=RECORD)
    for answer in (unknown.SerializeToString(), Unavailable("its store is away")):
        broker = Broker()
        broker.run(100)
        for controller in broker.all:
            controller.alter = answer
        broker.controllers.alter(AlterSyncStateSet(2, 7, frozenset("a")))
        asked = [Kind.ALTER_SYNC_STATE_SET in item.asked for item in broker.all]
        assert sorted(asked) == [False, True]
        broker.all[asked.index(False)].alter = written.SerializeToString()
        broker.run(10)
        broker.controllers.alter(AlterSyncStateSet(2, 7, frozenset("a")))
        assert broker.records == [GroupRecord("a", 2, ("a", "b"), 7)]
