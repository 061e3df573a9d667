"""The retry policy of a group: steps or an exponential back-off, and its jitter."""

import pytest

from popmq.common.back_off import ExponentialBackOff
from popmq.common.errors import Refused
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.harness.core_broker import CoreBroker, pop


@pytest.fixture
def core() -> CoreBroker:
    broker = CoreBroker()
    broker.topic("orders")
    return broker


def create(core: CoreBroker, **exponential: int) -> pb.Group:
    group = pb.Group(name="g", exponential=pb.ExponentialBackOff(**exponential))
    reply = core.reply(Kind.CREATE_GROUP, pb.CreateGroupRequest(group=group).SerializeToString())
    return pb.GroupReply.FromString(reply).group


def alter(core: CoreBroker, **fields: object) -> pb.Group:
    request = pb.AlterGroupRequest(group=pb.Group(name="g", **fields))  # type: ignore[arg-type]
    reply = core.reply(Kind.ALTER_GROUP, request.SerializeToString())
    return pb.GroupReply.FromString(reply).group


def nacked_ms(core: CoreBroker) -> int:
    """How long a push consumer's nack keeps the one message away, to 10 ms."""
    reply = core.reply(Kind.POP, pop("orders", "g", auto_renew=True, invisible_ms=0))
    (delivery,) = hop.decode_pop_reply(reply).deliveries
    core.change("orders", "g", delivery.handle, 0)
    (ck,) = [ck for ck in core.broker.table if ck.first_check_point is not None]
    return ck.revive_at_ms - core.broker.store.log_ms()


def test_an_exponential_back_off_grows_by_its_multiplier_up_to_its_longest_wait() -> None:
    back_off = ExponentialBackOff(1_000, 10_000, 2_500)
    assert [back_off.delay_without_jitter_ms(n) for n in range(1, 6)] == [
        1_000,
        2_500,
        6_250,
        10_000,
        10_000,
    ]
    assert back_off.delay_without_jitter_ms(10_000) == 10_000
    assert back_off.whole_second_steps(64) == (1_000, 3_000, 7_000, 10_000)
    assert ExponentialBackOff(5, 10_000, 1_000).whole_second_steps(64) == (1_000,)


def test_jitter_lengthens_within_its_bound_and_is_the_same_in_every_replay() -> None:
    back_off = ExponentialBackOff(1_000, 60_000, 2_000, 20)
    waits = [back_off.after_ms(3, b"message %d" % n) for n in range(200)]
    assert waits == [back_off.after_ms(3, b"message %d" % n) for n in range(200)]
    assert 4_000 <= min(waits) < 4_200
    assert 4_600 < max(waits) <= 4_800
    assert back_off.after_ms(1, b"m") != back_off.after_ms(2, b"m") // 2


def test_a_push_nack_waits_by_the_groups_exponential_back_off(core: CoreBroker) -> None:
    create(core, initial_ms=3_000, multiplier_milli=3_000)
    core.send("orders", b"one")
    assert nacked_ms(core) == 3_000
    core.advance(3_100)
    assert nacked_ms(core) == 9_000


def test_a_nack_has_the_groups_jitter(core: CoreBroker) -> None:
    create(core, initial_ms=100_000, jitter_percent=50)
    core.send("orders", b"one")
    assert 100_000 < nacked_ms(core) <= 150_000


def test_an_exponential_back_off_survives_a_restart_and_a_snapshot(core: CoreBroker) -> None:
    group = create(core, initial_ms=3_000, max_ms=9_000, multiplier_milli=1_500, jitter_percent=7)
    for _ in range(2):  # from the log, then from the snapshot of a clean stop
        core.stop()
        core.start()
        assert core.broker.registry.group("g").exponential == ExponentialBackOff(
            3_000, 9_000, 1_500, 7
        )
    assert group.retry == "exponential"


def test_an_alter_changes_one_part_and_steps_replace_the_whole(core: CoreBroker) -> None:
    create(core, initial_ms=3_000)
    altered = alter(core, exponential=pb.ExponentialBackOff(jitter_percent=10))
    assert (altered.exponential.initial_ms, altered.exponential.jitter_percent) == (3_000, 10)
    assert alter(core, max_attempts=3).exponential == altered.exponential
    assert alter(core, exponential=pb.ExponentialBackOff(jitter_percent=0)).exponential.HasField(
        "jitter_percent"
    )
    assert alter(core, back_off_ms=[1, 2]).retry == "customised"
    assert alter(core, retry="exponential").exponential.initial_ms == 1_000
    assert alter(core, retry="customised").back_off_ms == [1, 2]


@pytest.mark.parametrize(
    ("exponential", "named"),
    [
        ({"initial_ms": 0}, "0 ms"),
        ({"initial_ms": 5_000, "max_ms": 4_000}, "5000 ms"),
        ({"max_ms": 13 * 3_600_000}, "46800000 ms"),
        ({"multiplier_milli": 999}, "0.999"),
        ({"multiplier_milli": 100_001}, "100.001"),
        ({"jitter_percent": 101}, "101 %"),
        ({"jitter_percent": -1}, "-1 %"),
    ],
)
def test_an_impossible_back_off_is_refused_by_its_value(
    core: CoreBroker, exponential: dict[str, int], named: str
) -> None:
    with pytest.raises(Refused, match=named):
        create(core, **exponential)


def test_steps_and_an_exponential_back_off_do_not_go_together(core: CoreBroker) -> None:
    create(core, initial_ms=1)
    with pytest.raises(Refused, match="not both"):
        alter(core, retry="exponential", back_off_ms=[1])
    with pytest.raises(Refused, match="initial, max"):
        alter(core, retry="customised", exponential=pb.ExponentialBackOff(initial_ms=1))
    with pytest.raises(Refused, match="linear"):
        alter(core, retry="linear")
