"""`popmq dlq`: what it shows, and a redrive in pieces against a real broker core."""

import json

import pytest
from cli.parsing import parsed

from popmq.cli.__main__ import main
from popmq.cli.client import CallRefused
from popmq.cli.dlq import PATIENCE_S, Redrive, letter_fields, letter_lines, redrive_request
from popmq.common.errors import Code, PopmqError, Unavailable
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.harness.core_broker import CoreBroker


def letter() -> admin.DeadLetter:
    return admin.DeadLetter(
        broker="broker-a",
        queue_offset=7,
        position=1234,
        dead_ms=1_700_000_003_000,
        attempts=3,
        reason="max attempts",
        origin_topic="orders",
        origin_queue_id=2,
        origin_offset=99,
        first_delivery_ms=1_700_000_001_000,
        head=api.Message(body=b"hello").SerializeToString(),
        properties=api.SystemProperties(message_id="01AB", tag="t").SerializeToString(),
    )


def test_a_dead_letter_is_shown_with_its_content_and_its_origin() -> None:
    assert letter_lines(letter()).splitlines() == [
        "hello  id=01AB  tag=t  attempt=3",
        "    broker=broker-a offset=7 position=1234 origin=orders/2/99 attempts=3 "
        "reason='max attempts'",
        "    first=2023-11-14T22:13:21.000+00:00 last=- dead=2023-11-14T22:13:23.000+00:00 "
        "redriven=no",
    ]


def test_a_delayed_message_that_was_rejected_at_once_is_not_shown_as_late() -> None:
    rejected = letter()
    rejected.attempts = 1
    due = api.SystemProperties(message_id="01AB")
    due.delivery_timestamp.FromJsonString("2023-11-14T22:13:20Z")
    rejected.properties = due.SerializeToString()
    first = letter_lines(rejected).splitlines()[0]
    assert first == "hello  id=01AB  attempt=1  due=2023-11-14T22:13:20.000+00:00"


def test_as_json_a_dead_letter_has_a_body_only_when_asked() -> None:
    value = json.loads(json.dumps(letter_fields(letter(), bodies=True)))
    assert (value["message_id"], value["body"], value["tag"]) == ("01AB", "hello", "t")
    assert value["origin"] == {"topic": "orders", "queue_id": 2, "offset": 99}
    assert (value["reason"], value["last_delivery_ms"]) == ("max attempts", None)
    assert "body" not in letter_fields(letter(), bodies=False)


def test_filters_become_the_request() -> None:
    args = parsed(
        "dlq",
        "redrive",
        "g",
        "--topic",
        "orders",
        "--dry-run",
        "--rate",
        "50/s",
        "--filter",
        "tag=a",
        "--filter",
        "key=k=1",
        "--filter",
        "before=1970-01-01T00:00:09Z",
        "--filter",
        "after=1970-01-01T00:00:02Z",
    )
    assert args.rate == 50
    assert redrive_request(args) == admin.RedriveRequest(
        group="g",
        topic="orders",
        dry_run=True,
        tag="a",
        key="k=1",
        before_ms=9_000,
        after_ms=2_000,
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["dlq", "redrive", "g", "--filter", "colour=red"],
        ["dlq", "redrive", "g", "--filter", "tag="],
        ["dlq", "redrive", "g", "--filter", "before=noon"],
        ["dlq", "redrive", "g", "--rate", "0"],
        ["dlq", "redrive", "g", "--rate", "fast"],
        ["dlq", "list"],
        ["dlq", "peek", "g", "--count", "0"],
    ],
)
def test_what_makes_no_sense_is_wrong_usage(argv: list[str]) -> None:
    assert main(argv) == 2


class Turned:
    """A clock that a sleep turns, so that a pace takes no time."""

    def __init__(self) -> None:
        self.s = 100.0

    def now_s(self) -> float:
        return self.s

    def sleep_s(self, seconds: float) -> None:
        self.s += seconds


def core_with_letters(count: int) -> CoreBroker:
    core = CoreBroker()
    core.topic("orders", queues=1)
    core.group("g")
    for number in range(count):
        core.send("orders", b"%d" % number)
    while batch := core.receive("orders", "g"):
        for delivery in batch:
            core.reject("orders", "g", delivery.handle)
    return core


def asker(core: CoreBroker, asked: list[admin.RedriveRequest]) -> Redrive:
    def ask(request: admin.RedriveRequest) -> admin.RedriveReply:
        asked.append(admin.RedriveRequest.FromString(request.SerializeToString()))
        reply = core.reply(Kind.REDRIVE, request.SerializeToString())
        return admin.RedriveReply.FromString(reply)

    clock = Turned()
    return Redrive(ask, now_s=clock.now_s, sleep_s=clock.sleep_s)


def test_a_redrive_goes_in_pieces_to_the_end_that_was_there_at_first() -> None:
    core = core_with_letters(250)
    asked: list[admin.RedriveRequest] = []
    run = asker(core, asked)
    total = run.all(admin.RedriveRequest(group="g"))
    assert (total.redriven, total.already) == (250, 0)
    assert [(request.from_offset, request.dry_run) for request in asked] == [
        (0, True),
        (0, False),
        (100, False),
        (200, False),
    ]
    assert all(request.end_offset == 250 for request in asked[1:])
    assert len({delivery.head for delivery in drained(core)}) == 250
    assert run.all(admin.RedriveRequest(group="g")).already == 250


def test_a_redrive_knows_that_a_broker_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    core = core_with_letters(3)
    here = asker(core, []).ask

    def ask(request: admin.RedriveRequest) -> admin.RedriveReply:
        """As a proxy answers that reaches one of two broker groups."""
        reply = here(request)
        if not request.broker:
            reply.incomplete = "broker broker-b: broker broker-b has no master now"
        return reply

    run = Redrive(ask)
    assert run.all(admin.RedriveRequest(group="g")).redriven == 3
    assert run.incomplete == "broker broker-b: broker broker-b has no master now"
    assert "popmq: not everything: broker broker-b" in capsys.readouterr().err
    whole = asker(core, [])
    assert whole.all(admin.RedriveRequest(group="g")).already == 3
    assert whole.incomplete == ""


def drained(core: CoreBroker) -> list[Delivery]:
    deliveries: list[Delivery] = []
    while batch := core.receive("orders", "g"):
        deliveries += batch
    return deliveries


def test_a_rate_is_kept() -> None:
    core = core_with_letters(60)
    run = asker(core, [])
    run.rate = 20
    began_s = run.now_s()
    assert run.all(admin.RedriveRequest(group="g")).redriven == 60
    assert run.now_s() - began_s == pytest.approx(3.0)


def test_a_dry_run_counts_everything_and_does_not_wait() -> None:
    core = core_with_letters(150)
    run = asker(core, [])
    run.rate = 1
    began_s = run.now_s()
    assert run.all(admin.RedriveRequest(group="g", dry_run=True)).redriven == 150
    assert run.now_s() == began_s
    assert core.receive("orders", "g") == []


def test_a_broker_that_is_away_for_a_while_is_waited_for_and_what_it_did_is_not_done_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    core = core_with_letters(150)
    run = asker(core, [])
    real, calls = run.ask, iter(range(100))

    def flaky(request: admin.RedriveRequest) -> admin.RedriveReply:
        number = next(calls)
        reply = real(request) if number != 2 else None
        if number in (1, 3):  # it was done, and the answer was lost
            raise Unavailable("lost the connection")
        if reply is None:
            raise CallRefused(Code.HA_NOT_AVAILABLE, "the broker is away")
        return reply

    run.ask = flaky
    total = run.all(admin.RedriveRequest(group="g"))
    assert total.redriven + total.already == 150
    assert len(drained(core)) == 150
    assert "trying again" in capsys.readouterr().err


def test_a_refusal_that_does_not_pass_ends_a_redrive_at_once() -> None:
    run = asker(core_with_letters(1), [])
    with pytest.raises(PopmqError, match="nobody"):
        run.all(admin.RedriveRequest(group="nobody"))
    began_s = run.now_s()

    def away(request: admin.RedriveRequest) -> admin.RedriveReply:
        raise Unavailable("away")

    run.ask = away
    with pytest.raises(Unavailable):
        run.all(admin.RedriveRequest(group="g"))
    assert PATIENCE_S < run.now_s() - began_s < PATIENCE_S + 2
