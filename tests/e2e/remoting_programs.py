"""Programs that run scenarios of a Remoting client and print what it saw as lines of JSON."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from e2e.many import Many
from e2e.processes import Cluster, OwnProcess
from programs import run_program

RUN_S = 120

Event = dict[str, str]
Server = Cluster | Many


def run_scenario(command: Sequence[str]) -> list[Event]:
    """The events of one scenario; none of them is an error."""
    done = run_program(command, timeout=RUN_S)
    events: list[Event] = [json.loads(line) for line in done.stdout.splitlines()]
    assert events, done.stderr
    assert [event for event in events if event["event"] == "error"] == [], done.stdout + done.stderr
    return events


def received(cluster: Server, topic: str, count: int) -> list[dict[str, object]]:
    """Messages as `popmq recv`, a gRPC client, gets them."""
    options = ("--group", "checkers", "--count", str(count), "--ack", "--json", "--wait", "25s")
    lines = cluster.popmq("recv", topic, *options).splitlines()
    return [json.loads(line) for line in lines]


class ConsumerProgram(OwnProcess):
    """A program that consumes until its standard input ends, and the events that it has printed."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._events: list[Event] = []
        self._changed = threading.Condition()

    def start(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def end(self) -> None:
        """It leaves its group, as a consumer that shuts down does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def kill(self) -> None:
        self._process.kill()

    def got(self) -> list[Event]:
        with self._changed:
            return [event for event in self._events if event["event"] == "got"]

    def wait(self, met: Callable[[list[Event]], bool], what: str) -> None:
        """Until what it got is enough; what it may print as an error fails the test."""
        with self._changed:
            enough = self._changed.wait_for(lambda: met(self._list()), RUN_S)
            assert enough, f"{what}: {self._events}"

    def wait_for(self, kind: str, count: int) -> list[Event]:
        """So many events of that kind."""
        with self._changed:
            enough = self._changed.wait_for(lambda: len(self._of(kind)) >= count, RUN_S)
            assert enough, f"{count} of {kind}: {self._events}"
            return self._of(kind)

    def wait_started(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self._events), RUN_S)

    def _list(self) -> list[Event]:
        return self._of("got")

    def _of(self, kind: str) -> list[Event]:
        errors = [event for event in self._events if event["event"] == "error"]
        assert not errors, errors
        return [event for event in self._events if event["event"] == kind]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._events.append(json.loads(line))
                self._changed.notify_all()


def send(cluster: Server, topic: str, count: int) -> None:
    cluster.popmq("send", topic, "text", "--count", str(count))


def ids(*consumers: ConsumerProgram) -> set[str]:
    return {event["id"] for consumer in consumers for event in consumer.got()}


def texts(events: list[Event]) -> list[str]:
    return sorted(event["body"] for event in events)


def check_that_two_share_the_queues(
    cluster: Server,
    topic: str,
    program: ConsumerProgram,
    two: ConsumerProgram,
    while_both: Callable[[], None] = lambda: None,
) -> None:
    """And the first of them takes all, when the second has left."""
    with program:
        with two:
            program.wait_started()
            two.wait_started()
            sent, deadline_s = 0, time.monotonic() + RUN_S
            while not (program.got() and two.got()):  # each has some of the queues
                # An orderly consumer asks for its locks again every 20 s.
                assert time.monotonic() < deadline_s, f"one has all messages of {sent}"
                send(cluster, topic, 40)
                sent += 40
            two.wait(lambda _: len(ids(program, two)) == sent, "all messages")
            while_both()
        send(cluster, topic, 40)
        program.wait(lambda _: len(ids(program, two)) == sent + 40, "the messages of all queues")


def check_order(*consumers: ConsumerProgram) -> None:
    """No message came twice, and each consumer got every queue's messages in their order."""
    all_places: list[tuple[str, str, int]] = []
    for consumer in consumers:
        last: dict[tuple[str, str], int] = {}
        for event in consumer.got():
            place, offset = (event["broker"], event["queue"]), int(event["offset"])
            assert offset > last.get(place, -1), place
            last[place] = offset
            all_places.append((*place, offset))
    assert len(set(all_places)) == len(all_places)
