"""`popmq broker list` and `popmq failover`: what they show, and against a running popmq."""

import json

import pytest
from cli.parsing import invoked, parsed

from popmq.cli.__main__ import main
from popmq.cli.brokers import failover_lines, list_lines, list_rows, run_failover, run_list
from popmq.common.wire import controller_pb2 as pb
from popmq.testing.pytest_plugin import *  # noqa: F403 - the fixture popmq_broker
from popmq.testing.running_broker import RunningBroker


def member(node: str, role: pb.BrokerRole.ValueType, end: int, **more: object) -> pb.Member:
    return pb.Member(
        broker=pb.BrokerAddress(
            broker="shop", address=f"{node}:1", epoch=3, store_id=f"id-{node}", node=node
        ),
        role=role,
        end=end,
        alive=more.pop("alive", True),  # type: ignore[arg-type]
        silent_ms=120,
        replicas=3,
        **more,  # type: ignore[arg-type]
    )


FOUND = pb.ListReplicasReply(
    groups=[
        pb.GroupState(
            group="shop",
            record=pb.GroupRecord(leader="id-a", epoch=3, sync_state_set=["id-a", "id-b"]),
            members=[
                member("a", pb.MASTER, 900),
                member("b", pb.SLAVE, 880),
                member("c", pb.COPYING, 150, catch_up_from=100, catch_up_to=300, alive=False),
            ],
            trouble="something is wrong",
        )
    ]
)


def test_brokers_are_listed_with_their_lag_and_what_is_wrong() -> None:
    assert "\n".join(list_lines(FOUND)).splitlines() == [
        "GROUP  NODE  ROLE           EPOCH  END  BEHIND  IN-SYNC  HEARD  ADDRESS",
        "shop   a     master         3      900  0       yes      now    a:1",
        "shop   b     slave          3      880  20      yes      now    b:1",
        "shop   c     copying, dead  3      150  750     no       now    c:1",
        "shop: c copies: 25 % of 200 bytes",
        "shop: something is wrong",
    ]


def test_as_json_a_line_is_a_group() -> None:
    (document,) = json.loads(json.dumps(list_rows(FOUND)))
    assert document["record"]["sync_state_set"] == ["id-a", "id-b"]
    assert [item["role"] for item in document["members"]] == ["MASTER", "SLAVE", "COPYING"]
    assert document["members"][2]["alive"] is False


def test_a_failover_says_what_it_did() -> None:
    done = pb.FailoverReply(
        from_node="a",
        to_node="b",
        handed_over=True,
        steps=["a stopped"],
        after=pb.GroupRecord(epoch=4),
    )
    assert failover_lines("shop", done, dry_run=False) == [
        "- a stopped",
        "b leads shop in epoch 4 after a",
        "nothing is lost: the master before hands over all that it confirmed",
    ]


def test_an_unclean_failover_says_what_is_lost() -> None:
    done = pb.FailoverReply(
        to_node="c",
        lost_from=150,
        lost_to=900,
        lost_nodes=["a", "b"],
        after=pb.GroupRecord(epoch=4),
    )
    assert failover_lines("shop", done, dry_run=True) == [
        "c would lead shop in epoch 4",
        "would be lost: up to 750 bytes of log, from 150 to 900 as far as is known, and whatever "
        "a, b confirmed since; make sure that none of them runs",
    ]


def test_the_commands_are_found_beside_the_role() -> None:
    assert parsed("broker", "--config", "x").config == "x"
    assert invoked("broker", "list", "--group", "shop").run is run_list
    invocation = invoked("failover", "shop", "--to", "b", "--unclean", "--dry-run")
    args = invocation.args
    assert (invocation.run, args.group, args.to, args.unclean, args.dry_run) == (
        run_failover,
        "shop",
        "b",
        True,
        True,
    )


def test_a_running_popmq_lists_its_broker_and_has_nobody_to_fail_over_to(
    popmq_broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["broker", "list", "--endpoint", popmq_broker.endpoint, "--json"]) == 0
    (document,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (only,) = document["members"]
    assert (document["group"], only["role"], only["alive"]) == ("broker-a", "MASTER", True)
    assert main(["failover", "broker-a", "--yes", "--endpoint", popmq_broker.endpoint]) == 1
    assert "broker group broker-a has one broker" in capsys.readouterr().err
