"""Requests that are done in steps: bounded in number, and fair to everything else."""

import pytest

from popmq.broker.handlers import request_runner as runner_module
from popmq.broker.handlers.request_runner import RequestRunner
from popmq.broker.operations.resumable_reads import ResumableRead, read_now
from popmq.common.errors import Code, PopmqError, Refused, TooManyRequests
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.testing.harness.core_broker import Answer, CoreBroker


class Counted:
    """Answers at its n-th step."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def steps(self) -> ResumableRead[bytes]:
        self.left -= 1
        while self.left:
            yield None
            self.left -= 1
        return b"done"


def broken() -> ResumableRead[bytes]:
    raise AssertionError("a broken invariant")
    yield None


def refusing() -> ResumableRead[bytes]:
    yield None
    raise Refused(Code.NOT_FOUND, "gone meanwhile")


def test_a_job_takes_one_step_in_each_turn_of_the_loop() -> None:
    core = CoreBroker()
    runner = RequestRunner(core.broker.store)
    first, second = Counted(3), Counted(3)
    answers = [Answer(), Answer()]
    runner.run(first.steps(), answers[0].on_result)
    runner.run(second.steps(), answers[1].on_result)
    assert (first.left, second.left) == (2, 2)
    core.tick()
    assert (first.left, second.left) == (1, 2)
    core.run_until_idle()
    assert [answer.body for answer in answers] == [b"done", b"done"]
    assert runner.running == 0


def test_what_comes_before_a_step_comes_before_each_step() -> None:
    core, job = CoreBroker(), Counted(3)
    left_before: list[int] = []
    runner = RequestRunner(core.broker.store, lambda: left_before.append(job.left))
    runner.run(job.steps(), Answer().on_result)
    core.run_until_idle()
    assert left_before == [3, 2, 1]


def test_a_job_sees_an_ack_that_waits_for_its_record() -> None:
    core = CoreBroker()
    core.topic("orders", queues=1)
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g")
    request = hop.encode_ack(hop.AckRequest("orders", "g", [delivery.handle]))
    core.ask(Kind.ACK, request, settle=False)
    seen: list[int] = []

    def look() -> bytes:
        seen.append(core.broker.table.in_flight)
        return b"done"

    core.server.runner.run(read_now(look), Answer().on_result)
    assert seen == [0]
    core.run_until_idle()


def test_a_refusal_in_a_later_step_is_the_answer() -> None:
    core = CoreBroker()
    runner = RequestRunner(core.broker.store)
    answer = Answer()
    runner.run(refusing(), answer.on_result)
    core.run_until_idle()
    assert isinstance(answer.error, PopmqError)
    assert answer.error.code is Code.NOT_FOUND
    assert runner.running == 0


def test_jobs_are_bounded_in_number_and_one_that_breaks_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "REQUEST_LIMIT", 1)
    core = CoreBroker()
    runner = RequestRunner(core.broker.store)
    with pytest.raises(AssertionError, match="broken invariant"):
        runner.run(broken(), Answer().on_result)
    answer = Answer()
    runner.run(Counted(2).steps(), answer.on_result)
    with pytest.raises(TooManyRequests):
        runner.run(Counted(1).steps(), Answer().on_result)
    core.run_until_idle()
    assert answer.body == b"done"
