"""Drives official clients in subprocesses and checks what they saw (python_client.py, node/).

The scenario sends in small portions, waits until every group has seen each one, and then rests
half as long as that took: a message that comes back finds its consumer waiting and a processor
free, so lateness is the server's and not that of eight busy processes on two cores.  The largest
messages go last and one by one, when nothing else is due (see PYTHON_MS_PER_MIB).
"""

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from e2e.ledger import Cause, Delivery, Report, Rule, Sent, check_group, table
from e2e.payloads import Fields, comes_back, is_largest, payload
from e2e.processes import STOP_S, Cluster, OwnProcess, Served, role_environment, tail
from programs import run_program

from popmq.common.namespaces import wrap_namespace

HERE = Path(__file__).parent
NODE = HERE / "node"
NODE_CLIENT_VERSION = "1.0.8"
ALI_ONS_VERSION = "3.12.0"
PYTHON_CLIENT_VERSION = "5.1.2"
# The Python client writes each reply out as text on its only I/O thread, for a log that is
# off: for 4 MiB of random bytes 0.5 s alone and 0.67 to 0.88 s when three consumers do it at the
# same time on two processors.
PYTHON_MS_PER_MIB = 210

START_S = 30.0
PORTION = 20
PORTION_S = 30.0
INVISIBLE_S = 5
PUSH_BACK_OFF_MS = 1_000

Event = dict[str, Any]
RoleName = Literal["producer", "simple", "push", "lite", "payloads", "orphans"]
Launch = Callable[[RoleName], list[str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    reports: list[Report]
    errors: list[str]

    def check(self, what: str, *, sent: int) -> None:
        """Every group got each of so many messages as often as it should; prints its table."""
        print(f"\n{what}\n{table(self.reports)}")
        assert self.errors == []
        assert [report.faults for report in self.reports] == [[], [], []]
        assert [report.sent for report in self.reports] == [sent] * 3


class OfficialClient(OwnProcess):
    """One role of an official client."""

    def __init__(self, name: str, command: list[str], *, folder: Path) -> None:
        self.name = name
        self.delivered = 0
        self.distinct: set[str] = set()  # ids of the messages delivered
        self._events: dict[str, list[Event]] = defaultdict(list)
        self._command = command
        self._log = folder / f"client-{name}.log"
        self._home = folder / f"home-{name}"
        self._home.mkdir(parents=True)
        self._changed = threading.Condition()
        self._ended = False
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, name=f"{name}-events")

    def tell(self, **command: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def wait(self, done: Callable[[], bool], what: str, *, within_s: float) -> None:
        """Return once `done()`; fail when the process ends or the time is up."""
        if not self.comes(done, within_s=within_s):
            state = "ended" if self._ended else f"{within_s:g} s went by"
            seen = {kind: len(events) for kind, events in self._events.items()}
            errors = self._events["error"][-3:]
            raise AssertionError(
                f"{self.name}: {state} without {what}; events {seen}; last errors {errors};"
                f" the end of its log:\n{tail(self._log)}"
            )

    def comes(self, done: Callable[[], bool], *, within_s: float) -> bool:
        """Whether `done()`, asked again after each event, became true in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or done(), within_s)
            return done()

    def of(self, kind: str) -> list[Event]:
        with self._changed:
            return list(self._events[kind])

    def count(self, kind: str) -> int:
        return len(self._events[kind])

    def start(self) -> None:
        environment = role_environment(
            {"HOME": str(self._home), "PYTHONPATH": str(HERE.parent), "PYTHONUTF8": "1"}
        )
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
            )
        self._reader.start()

    def end(self) -> None:
        if not self._ended:
            assert self._process is not None
            self.tell(op="stop")
            self._process.wait(STOP_S)

    def stop(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stdin.close()
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            with self._changed:
                self._events[event["event"]].append(event)
                if event["event"] == "delivered":
                    self.delivered += 1
                    self.distinct.add(event["message_id"])
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Scenario:
    """What one run sends, and through which clients.

    The producer and the first SimpleConsumer use the first proxy of the cluster, the second
    SimpleConsumer and the PushConsumer the last one; each consumer has a group of its own.
    """

    launch: Launch
    seed: int
    count: int
    max_body: int
    topic: str = "official"
    client_ms_per_mib: int = 0
    namespace: str = ""
    late_ms: int = 500

    def groups(self) -> list[str]:
        return [rule.group for rule in self.rules()]

    def rules(self) -> list[Rule]:
        waits = {
            "simple-1": (Cause.EXPIRED, INVISIBLE_S * 1_000),
            "simple-2": (Cause.EXPIRED, INVISIBLE_S * 1_000),
            "push": (Cause.NACK, PUSH_BACK_OFF_MS),
        }
        return [
            Rule(
                f"{self.topic}-{name}",
                cause,
                wait_ms,
                late_ms=self.late_ms,
                client_ms_per_mib=self.client_ms_per_mib,
            )
            for name, (cause, wait_ms) in waits.items()
        ]

    def expected(self, k: int) -> Fields:
        return payload(seed=self.seed, k=k, max_body=self.max_body).fields()

    def run(self, cluster: Served, folder: Path) -> Outcome:
        names = [wrap_namespace(self.namespace, name) for name in (self.topic, *self.groups())]
        cluster.create(topic=names[0], groups=names[1:])
        first, last = cluster.endpoints[0], cluster.endpoints[-1]
        roles: list[RoleName] = ["simple", "simple", "push"]
        with ExitStack() as stack:
            consumers = [
                stack.enter_context(OfficialClient(rule.group, self.launch(role), folder=folder))
                for rule, role in zip(self.rules(), roles, strict=True)
            ]
            producer = stack.enter_context(
                OfficialClient("producer", self.launch("producer"), folder=folder)
            )
            for client, endpoint in zip(
                [*consumers, producer], [first, last, last, first], strict=True
            ):
                client.tell(
                    op="start",
                    endpoint=endpoint,
                    topic=self.topic,
                    group=client.name,
                    namespace=self.namespace,
                    invisible_s=INVISIBLE_S,
                )
            for client in [*consumers, producer]:
                client.wait(partial(_is_ready, client), "being ready", within_s=START_S)
            self._send_all(producer, consumers)
            return self._check(producer, consumers)

    def _send_all(self, producer: OfficialClient, consumers: list[OfficialClient]) -> None:
        small = [k for k in range(self.count) if not is_largest(k)]
        for first in range(0, len(small), PORTION):
            started = time.monotonic()
            self._send(producer, consumers, small[first : first + PORTION])
            time.sleep((time.monotonic() - started) / 2)
        self._wait_returns(producer, consumers, within_s=INVISIBLE_S + 5)
        for k in range(self.count):
            if is_largest(k):
                self._send(producer, consumers, [k])
                # Only the push consumer's next delivery can meet the next message.
                self._wait_returns(producer, consumers[-1:], within_s=5)
        self._wait_returns(producer, consumers, within_s=INVISIBLE_S + 5)
        # And now for deliveries that must not come: a lost acknowledgement shows only when
        # the message's invisible time is over.
        self._wait_returns(producer, consumers, within_s=INVISIBLE_S + 1, more=1)

    def _send(
        self, producer: OfficialClient, consumers: list[OfficialClient], numbers: list[int]
    ) -> None:
        """Send these messages and wait until every group has seen them."""
        portions = producer.count("done") + 1
        producer.tell(op="send", numbers=numbers, seed=self.seed, max_body=self.max_body)
        producer.wait(
            partial(_has_sent, producer, portions),
            f"messages {numbers[0]} to {numbers[-1]} sent",
            within_s=PORTION_S,
        )
        sent = producer.count("sent")
        for consumer in consumers:
            consumer.wait(
                partial(_has_seen, consumer, sent),
                f"{sent} messages received",
                within_s=PORTION_S,
            )

    @staticmethod
    def _wait_returns(
        producer: OfficialClient,
        consumers: list[OfficialClient],
        *,
        within_s: float,
        more: int = 0,
    ) -> None:
        """Give these groups time for every second delivery owed by now, and `more`."""
        sent = [event["k"] for event in producer.of("sent")]
        owed = len(sent) + sum(map(comes_back, sent)) + more
        until = time.monotonic() + within_s
        for consumer in consumers:
            left_s = max(0.0, until - time.monotonic())
            consumer.comes(partial(_has_deliveries, consumer, owed), within_s=left_s)

    def _check(self, producer: OfficialClient, consumers: list[OfficialClient]) -> Outcome:
        sent = [_sent(event) for event in producer.of("sent")]
        expected = {message.k: self.expected(message.k) for message in sent}
        reports = [
            check_group(
                rule,
                sent,
                [_delivery(event) for event in consumer.of("delivered")],
                expected=expected.__getitem__,
                comes_back=comes_back,
                ack_failed=frozenset(
                    (event["message_id"], event["attempt"]) for event in consumer.of("ack_failed")
                ),
            )
            for rule, consumer in zip(self.rules(), consumers, strict=True)
        ]
        errors = [
            f"{client.name}: {event}"
            for client in [producer, *consumers]
            for kind in ("send_failed", "ack_failed", "error")
            for event in client.of(kind)
        ]
        return Outcome(reports, errors)


def check_that_connections_may_end(
    launch: Launch, seed: int, folder: Path, *, transport: str, client_ms_per_mib: int = 0
) -> None:
    """Nothing is lost while connections reach their age."""
    scenario = Scenario(
        launch=launch,
        seed=seed,
        count=300,
        max_body=1 << 20,
        client_ms_per_mib=client_ms_per_mib,
    )
    ages = {
        "POPMQ_PROXY_TRANSPORT": transport,
        "POPMQ_LEAN_MAX_AGE_MS": "5000",
        "POPMQ_LEAN_MAX_AGE_GRACE_MS": "12000",
    }
    with Cluster(folder, proxies=2, settings=ages) as cluster:
        outcome = scenario.run(cluster, folder)
        aged = [proxy.metric("popmq_proxy_lean_aged_total") for proxy in cluster.proxies]
    outcome.check(f"{aged} connections reached their age", sent=scenario.count)
    assert min(aged) > 2


def check_that_it_makes_our_messages(
    launch: Launch, seed: int, folder: Path, *, count: int, max_body: int
) -> None:
    """Those that payloads.py makes of the same numbers."""
    with OfficialClient("payloads", launch("payloads"), folder=folder) as client:
        client.tell(op="start", seed=seed, count=count, max_body=max_body)
        client.wait(partial(_is_ready, client), "all messages made", within_s=60)
        created = client.of("payload")
    assert len(created) == count
    for k, event in enumerate(created):
        expected = payload(seed=seed, k=k, max_body=max_body).fields()
        assert event == {
            "event": "payload",
            "k": k,
            "sha256": expected.sha256,
            "size": expected.size,
            "keys": list(expected.keys),
            "tag": expected.tag,
            "properties": expected.properties,
        }


def launch_python(role: RoleName) -> list[str]:
    if importlib.util.find_spec("rocketmq") is None:
        pytest.fail(
            "the official client is missing; install it with"
            f" {sys.executable} -m pip install rocketmq-python-client=={PYTHON_CLIENT_VERSION}"
        )
    return [sys.executable, "-m", "e2e.python_client", role]


def over_tls(launch: Launch, certificate: str) -> Launch:
    """The same roles over TLS; they trust that certificate and no other."""
    roots = f"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH={certificate}"
    return lambda role: ["env", roots, *launch(role), "tls"]


def launch_node(role: RoleName) -> list[str]:
    return [_find_tool("node"), str(NODE / "client.mjs"), role]


def ensure_node_client() -> None:
    """Install the official Node client into node/node_modules unless it is there."""
    _ensure_package(NODE, "rocketmq-client-nodejs", NODE_CLIENT_VERSION)


def remoting_node_program() -> list[str]:
    """The command that runs node_remoting/client.cjs, whose client is installed if need be."""
    folder = HERE / "node_remoting"
    _ensure_package(folder, "ali-ons", ALI_ONS_VERSION)
    return [_find_tool("node"), str(folder / "client.cjs")]


def _ensure_package(folder: Path, name: str, version: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # another worker may be at it
        _install_package(folder, name, version)
    finally:
        os.close(descriptor)


def _install_package(folder: Path, name: str, version: str) -> None:
    manifest = folder / "node_modules" / name / "package.json"
    if manifest.exists() and json.loads(manifest.read_text())["version"] == version:
        return
    _find_tool("node")
    options = ["--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = run_program([_find_tool("npm"), "install", *options], cwd=folder, timeout=300)
    if done.returncode != 0:
        pytest.fail(f"npm install in {folder} failed:\n{done.stdout}{done.stderr}")


def _find_tool(name: str) -> str:
    """Where `name` is. Without it the test is skipped, but never in CI, which has it."""
    result = shutil.which(name)
    if result is None:
        reason = f"no {name} on PATH; Debian, Ubuntu: sudo apt-get install nodejs npm"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return result


def _is_ready(client: OfficialClient) -> bool:
    return client.count("ready") > 0


def _has_sent(producer: OfficialClient, portions: int) -> bool:
    return producer.count("done") >= portions


def _has_seen(consumer: OfficialClient, messages: int) -> bool:
    return len(consumer.distinct) >= messages


def _has_deliveries(consumer: OfficialClient, count: int) -> bool:
    return consumer.delivered >= count


def _sent(event: Event) -> Sent:
    return Sent(
        k=event["k"],
        message_id=event["message_id"],
        receipt_id=event["receipt_id"],
        born_ms=tuple(event["born_ms"]),
    )


def _delivery(event: Event) -> Delivery:
    """An absent time or attempt becomes -1, which no rule accepts."""
    return Delivery(
        message_id=event["message_id"],
        attempt=_number(event["attempt"]),
        fields=Fields(
            sha256=event["sha256"],
            size=event["size"],
            keys=tuple(event["keys"]),
            tag=event["tag"],
            properties=event["properties"],
        ),
        born_ms=_number(event["born_ms"]),
        corrupted=event["corrupted"],
        delivered_ms=_number(event["delivered_ms"]),
        received_ms=event["received_ms"],
        settled_ms=event["settled_ms"],
        acked=event["acked"],
    )


def _number(value: int | None) -> int:
    return -1 if value is None else value
