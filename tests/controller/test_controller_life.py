"""Controllers that restart, stand still, go away, and run twice; hints, long polls, routes."""

from collections.abc import Callable, Sequence

import pytest
from controller.controller_rig import (
    DEAD_MS,
    GROUP,
    HEARTBEAT_MS,
    LONG_MS,
    STEP_MS,
    Broker,
    Rig,
    ask,
    failover,
    members,
    running,
    three,
)

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import controller_pb2 as pb
from popmq.controller.controller import Controller
from popmq.controller.metadata_store import MemoryStore, MetadataStoreUnavailable, OnRead
from popmq.controller.record_follower import READ_MS


def routes(controller: Controller) -> Sequence[tuple[str, str, int]]:
    body = pb.RoutesRequest().SerializeToString()
    reply = pb.RoutesReply.FromString(ask(controller, Kind.ROUTES, body))
    return [(broker.broker, broker.address, broker.epoch) for broker in reply.brokers]


def watch(controller: Controller, view: int, *, store_id: str = "") -> list[bytes | PopmqError]:
    """The answers to one long poll, as they come."""
    answers: list[bytes | PopmqError] = []
    request = pb.WatchGroupRequest(
        cluster="popmq", group=GROUP, known_view=view, wait_ms=LONG_MS, store_id=store_id
    )
    controller.request(Kind.WATCH_GROUP, request.SerializeToString(), 2 * LONG_MS, answers.append)
    return answers


# -- a controller that is away


def test_a_restarted_controller_with_its_store_changes_nothing() -> None:
    rig = running()
    before = rig.record
    rig.controllers[:] = [rig.controller()]
    rig.run(10 * DEAD_MS)
    assert rig.record == before
    assert routes(rig.controllers[0]) == [(GROUP, "node-a:1", 1)]


def test_a_controller_that_was_away_for_an_hour_changes_nothing() -> None:
    rig = running()
    before = rig.record
    rig.clock.advance(3_600_000)
    rig.run(10 * DEAD_MS)
    assert rig.record == before


def test_a_new_controller_listens_before_it_takes_silence_for_death() -> None:
    rig = running()
    before = rig.record
    rig.controllers[:] = [rig.controller()]
    rig.broker("node-a").up = False
    rig.run(DEAD_MS - STEP_MS)
    assert rig.record == before
    rig.run(2 * HEARTBEAT_MS)
    assert rig.leader == "node-b"


def test_a_master_that_died_while_the_controller_stood_still_is_replaced_soon_after() -> None:
    rig = running()
    rig.broker("node-a").up = False
    rig.clock.advance(3_600_000)
    rig.run(DEAD_MS - HEARTBEAT_MS)
    assert rig.leader == "node-a"
    rig.run(4 * HEARTBEAT_MS)
    assert rig.leader == "node-b"


def test_a_controller_that_lost_its_records_lets_the_master_work_and_elects_nobody() -> None:
    rig = running()
    rig.store = MemoryStore()
    rig.controllers[:] = [rig.controller()]
    rig.run(10 * DEAD_MS)
    assert rig.record is None
    assert routes(rig.controllers[0]) == [(GROUP, "node-a:1", 1)]
    assert "3 brokers have data" in rig.state.trouble
    rig.broker("node-a").up = False
    rig.run(10 * DEAD_MS)
    assert rig.record is None


def test_a_human_says_who_leads_after_the_records_were_lost() -> None:
    rig = running()
    rig.store = MemoryStore()
    rig.controllers[:] = [rig.controller()]
    rig.broker("node-b").end = 70
    rig.run(2 * DEAD_MS)
    with pytest.raises(PopmqError, match="has no record: name its master"):
        failover(rig.controllers[0])
    reply = failover(rig.controllers[0], "node-b", unclean=True)
    assert reply.to_node == "node-b"
    assert rig.record == GroupRecord("store-node-b", 2, ("store-node-b",), 1)
    rig.run(HEARTBEAT_MS)
    assert rig.broker("node-a").role == pb.SLAVE


class AwayStore(MemoryStore):
    """Does not answer while it is `away`."""

    away = False

    def read(self, key: str, then: OnRead) -> None:
        if self.away:
            then(MetadataStoreUnavailable("connection refused"))
        else:
            super().read(key, then)


def test_while_the_metadata_store_is_away_routes_stay_and_nobody_is_elected() -> None:
    store = AwayStore()
    rig = running(store=store)
    store.away = True
    rig.controllers[:] = [rig.controller()]
    rig.broker("node-c").up = False
    rig.run(5 * DEAD_MS)
    assert routes(rig.controllers[0]) == [(GROUP, "node-a:1", 1)]
    assert rig.state.trouble == "connection refused"
    store.away = False
    rig.run(2 * DEAD_MS)
    assert (rig.state.trouble, rig.known) == ("", rig.record)


def test_a_record_that_was_set_back_elects_nobody() -> None:
    rig = running()
    for broker in rig.brokers:
        broker.epoch = 9
    rig.broker("node-a").up = False
    before = rig.record
    rig.run(5 * DEAD_MS)
    assert rig.record == before
    assert "node-b has accepted epoch 9, the metadata store knows 1" in rig.state.trouble


# -- two controllers


class HeldStore(MemoryStore):
    """The reads of one controller wait while it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: list[Callable[[], None]] | None = None

    def read(self, key: str, then: OnRead) -> None:
        if self.holds is None:
            super().read(key, then)
        else:
            self.holds.append(lambda: MemoryStore.read(self, key, then))

    def let_go(self) -> None:
        holds, self.holds = self.holds or [], None
        for read in holds:
            read()


def allowed_rebuild(rig: Rig) -> str:
    """The store that may be rebuilt, in the answer to a replica whose log is of no use."""
    request = pb.RegisterRequest.FromString(rig.broker("node-b").heartbeat())
    request.asks_rebuild = pb.LOG_DIFFERS
    reply = ask(rig.controllers[0], Kind.REGISTER, request.SerializeToString())
    return pb.RegisterReply.FromString(reply).rebuild


def test_while_the_metadata_store_is_away_no_rebuild_is_allowed() -> None:
    store = AwayStore()
    rig = running(store=store)
    assert allowed_rebuild(rig) == "store-node-b"
    store.away = True
    rig.run(2 * READ_MS)
    assert allowed_rebuild(rig) == ""
    store.away = False
    rig.run(2 * READ_MS)
    assert allowed_rebuild(rig) == "store-node-b"


def test_while_the_metadata_store_does_not_answer_no_rebuild_is_allowed() -> None:
    store = HeldStore()
    rig = running(store=store)
    store.holds = []
    rig.run(4 * READ_MS)
    assert allowed_rebuild(rig) == ""
    store.let_go()
    rig.run(READ_MS)
    assert allowed_rebuild(rig) == "store-node-b"


def test_what_another_controller_wrote_is_read_before_a_store_counts_as_set_back() -> None:
    rig = running(store=HeldStore())
    second = rig.controller()
    rig.controllers.append(second)
    rig.run(5 * DEAD_MS)
    store = rig.store
    assert isinstance(store, HeldStore)
    store.holds = []  # neither reads; the first one knows what it writes
    rig.deaf = {(1, broker.node) for broker in rig.brokers}
    rig.broker("node-a").up = False
    rig.run(5 * DEAD_MS)
    rig.deaf = set()
    rig.run(HEARTBEAT_MS)
    assert routes(rig.controllers[0]) == [(GROUP, "node-b:1", 2)]
    assert [replica.epoch for replica in second.groups[GROUP].replicas] == [1, 2, 2]
    assert routes(second) != routes(rig.controllers[0])
    assert second.groups[GROUP].state().trouble == ""
    store.let_go()
    rig.run(STEP_MS)
    assert routes(second) == routes(rig.controllers[0])


def test_a_controller_that_hears_nobody_of_a_group_does_not_disturb_the_other() -> None:
    rig = running(controllers=2)
    before = rig.record
    rig.deaf = {(1, broker.node) for broker in rig.brokers}
    rig.run(20 * DEAD_MS)
    assert rig.record == before


def test_two_controllers_that_see_different_brokers_never_make_two_masters_of_one_epoch() -> None:
    rig = running(controllers=2)
    rig.deaf = {(1, "node-a")}  # the second one elects another
    epochs: dict[int, set[str]] = {}
    for _ in range(200):
        rig.run(HEARTBEAT_MS)
        for broker in rig.brokers:
            if broker.role == pb.MASTER:
                epochs.setdefault(broker.epoch, set()).add(broker.node)
    assert len(epochs) > 1
    assert all(len(nodes) == 1 for nodes in epochs.values())


# -- hints


def test_a_broker_whose_connection_closed_and_that_nobody_answers_for_is_dead_at_once() -> None:
    rig = running()
    (controller,) = rig.controllers
    answers: list[bytes | PopmqError] = []
    request = pb.WatchGroupRequest(
        cluster="popmq",
        group=GROUP,
        known_view=controller.groups[GROUP].view,
        wait_ms=LONG_MS,
        store_id="store-node-a",
    ).SerializeToString()
    number = controller.request(Kind.WATCH_GROUP, request, 2 * LONG_MS, answers.append)
    rig.broker("node-a").up = False
    controller.cancel(number)
    assert rig.opened == ["node-a:1"]
    rig.step()
    assert rig.leader == "node-b"


@pytest.mark.parametrize(
    "answer",
    [b"", Refused(Code.UNSUPPORTED, "no"), Refused(Code.PROXY_TIMEOUT, "late")],
    ids=["an answer", "a refusal", "silence"],
)
def test_a_closed_connection_alone_is_no_proof(answer: bytes | PopmqError) -> None:
    rig = running()
    (controller,) = rig.controllers
    rig.peers["node-a:1"] = lambda kind, body: answer
    request = pb.WatchGroupRequest(
        cluster="popmq",
        group=GROUP,
        known_view=controller.groups[GROUP].view,
        wait_ms=LONG_MS,
        store_id="store-node-a",
    ).SerializeToString()
    number = controller.request(Kind.WATCH_GROUP, request, 2 * LONG_MS, lambda answer: None)
    controller.cancel(number)
    rig.run(DEAD_MS)
    assert rig.leader == "node-a"


# -- long polls


def test_a_watch_is_answered_in_the_step_that_elects() -> None:
    rig = running()
    (controller,) = rig.controllers
    answers = watch(controller, rig.state.view)
    rig.run(2 * DEAD_MS)
    assert answers == []
    rig.broker("node-a").up = False
    while rig.leader == "node-a":
        rig.run(STEP_MS)
    # The first news is that node-a is silent, which is told in the same step.
    answers += watch(controller, rig.state.view - 1)
    (_, newest) = (
        pb.WatchGroupReply.FromString(answer) for answer in answers if type(answer) is bytes
    )
    assert newest.state.record.leader == "store-node-b"


def test_a_watch_without_news_ends_in_time() -> None:
    rig = running()
    answers = watch(rig.controllers[0], rig.state.view)
    rig.run(LONG_MS - STEP_MS)
    assert answers == []
    rig.run(2 * STEP_MS)
    assert len(answers) == 1


def test_a_watch_that_was_cancelled_is_not_answered() -> None:
    rig = running()
    (controller,) = rig.controllers
    request = pb.WatchGroupRequest(
        cluster="popmq", group=GROUP, known_view=rig.state.view, wait_ms=LONG_MS
    )
    answers: list[bytes | PopmqError] = []
    number = controller.request(
        Kind.WATCH_GROUP, request.SerializeToString(), 2 * LONG_MS, answers.append
    )
    controller.cancel(number)
    rig.broker("node-a").up = False
    rig.run(2 * LONG_MS)
    assert answers == []


def test_a_controller_that_stops_answers_who_waits() -> None:
    rig = running()
    answers = watch(rig.controllers[0], rig.state.view)
    rig.controllers[0].stop()
    assert len(answers) == 1


# -- who may register


def test_a_second_process_under_a_nodes_name_is_refused_while_the_first_is_heard() -> None:
    rig = running()
    twin = Broker("node-b", address="elsewhere:1", store_id="store-x")
    with pytest.raises(PopmqError, match="store store-node-b at node-b:1 sent a heartbeat"):
        rig.beat(twin)
    rig.broker("node-b").up = False
    rig.run(2 * DEAD_MS)
    rig.beat(twin)
    assert [replica.node for replica in rig.controllers[0].groups[GROUP].replicas] == [
        "node-a",
        "node-b",
        "node-c",
    ]


def test_a_second_process_on_one_store_is_refused() -> None:
    rig = running()
    with pytest.raises(PopmqError, match="a data directory belong to one process"):
        rig.beat(Broker("node-d", address="elsewhere:1", store_id="store-node-b"))


def test_a_node_with_a_new_disk_takes_its_own_place_at_once() -> None:
    rig = running()
    rig.broker("node-c").store_id = "store-fresh"
    rig.broker("node-c").epoch = rig.broker("node-c").end = 0
    rig.beat()
    assert rig.controllers[0].groups[GROUP].replicas.get("store-node-c") is None


def test_a_broker_without_replicas_and_one_with_do_not_share_a_name() -> None:
    rig = running()
    single = Broker("node-z", replicas=1, epoch=4)
    with pytest.raises(PopmqError, match="has replicas, of which node-a is alive"):
        rig.beat(single)
    other = Rig()
    other.beat(single)
    with pytest.raises(PopmqError, match="registers without replicas"):
        other.beat(three()[0])


def test_a_heartbeat_of_an_epoch_that_the_store_has_left_is_passed_over() -> None:
    rig = running()
    node_b = rig.broker("node-b")
    late = Broker("node-b", epoch=0, role=pb.NOBODY, end=7)
    late.obeys = False
    rig.beat(late)
    replica = rig.controllers[0].groups[GROUP].replicas.get(node_b.store_id)
    assert replica is not None
    assert (replica.epoch, replica.end) == (1, 0)


# -- timer check points


def test_the_newest_timer_check_point_is_told_to_all_with_its_age() -> None:
    rig = running()
    rig.broker("node-a").timers = pb.TimerCheckPoint(
        epoch=1, last_read_ms=5_000, master_timer_queue_offset=40, age_ms=100
    )
    rig.broker("node-b").timers = pb.TimerCheckPoint(
        epoch=1, last_read_ms=4_000, master_timer_queue_offset=39, age_ms=50
    )
    rig.beat()
    rig.broker("node-a").up = False
    rig.clock.advance(300)
    rig.beat()
    check_point = rig.broker("node-c").reply.timer_check_point
    assert (check_point.last_read_ms, check_point.master_timer_queue_offset) == (5_000, 40)
    assert check_point.age_ms == 400


def test_a_check_point_of_a_later_epoch_is_newer_whatever_its_offset() -> None:
    rig = running()
    rig.broker("node-a").timers = pb.TimerCheckPoint(epoch=1, master_timer_queue_offset=40)
    rig.broker("node-b").timers = pb.TimerCheckPoint(epoch=2, master_timer_queue_offset=38)
    rig.beat()
    rig.beat()
    assert rig.broker("node-c").reply.timer_check_point.epoch == 2


# -- routes


def test_routes_name_the_master_and_move_with_the_record() -> None:
    rig = running()
    (controller,) = rig.controllers
    assert routes(controller) == [(GROUP, "node-a:1", 1)]
    answers: list[bytes | PopmqError] = []
    body = pb.RoutesRequest(known_version=controller.routes.version, wait_ms=LONG_MS)
    controller.request(Kind.ROUTES, body.SerializeToString(), LONG_MS, answers.append)
    rig.broker("node-b").end = 5
    rig.run(DEAD_MS)
    assert answers == []
    rig.broker("node-a").up = False
    rig.run(2 * DEAD_MS)
    assert len(answers) == 1
    assert routes(controller) == [(GROUP, "node-b:1", 2)]


def test_the_route_of_a_group_that_nobody_leads_stays() -> None:
    rig = running()
    for broker in rig.brokers:
        broker.up = False
    rig.run(20 * DEAD_MS)
    assert routes(rig.controllers[0]) == [(GROUP, "node-a:1", 1)]


# -- what is shown


def test_the_set_in_tests_is_what_the_state_shows() -> None:
    rig = running()
    assert members(rig.known) == ["node-a", "node-b", "node-c"]
    shown = rig.state
    assert [(member.broker.node, member.alive) for member in shown.members] == [
        ("node-a", True),
        ("node-b", True),
        ("node-c", True),
    ]
