"""Transactions of official clients while broker, proxies and producers die by kill -9.

Each half message is committed or rolled back once, as its producer's database says, whoever is
asked; none is seen before, and none is left.  E2E_SEED repeats the order of the kills.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from e2e.official import HERE, ensure_node_client, launch_node
from e2e.official_java import java_program
from e2e.processes import LOCAL, Cluster, OwnProcess, RoleFailed, free_port, role_environment
from e2e.transaction_client import ENDED, FAILED, SENT, TRIED, is_committed, is_forgotten

from popmq.common.errors import PopmqError
from popmq.testing.broker_calls import BrokerCalls

SEED = int(os.environ.get("E2E_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
TOPIC, AUDITOR = "trans", "auditor"
SETTLED_S = 60
SETTINGS = {
    "POPMQ_TRANSACTION_FIRST_CHECK_MS": "500",
    "POPMQ_TRANSACTION_CHECK_INTERVAL_MS": "1000",
    "POPMQ_TRANSACTION_MAX_CHECKS": "1000",
}


class Producer(OwnProcess):
    """An official client in a process of its own; begun again behind its last number."""

    def __init__(
        self, name: str, folder: Path, endpoint: str, numbers: range, program: list[str]
    ) -> None:
        self.journal = folder / f"{name}.journal"
        self._home = folder / name
        self._home.mkdir()
        self._endpoint = endpoint
        self._numbers = numbers
        self._program = program
        self._database = database_in(folder)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        tried = [number for what, number in self.said() if what == TRIED]
        first = max(tried, default=self._numbers.start - 1) + 1
        arguments = [self._endpoint, TOPIC, str(self.journal), str(first), str(self._numbers.stop)]
        arguments.append(str(self._database))
        environment = role_environment({}) | {"HOME": str(self._home)}
        environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
        self._process = subprocess.Popen(
            [*self._program, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def kill9(self) -> None:
        assert self._process is not None, "it does not run"
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None

    def end(self) -> None:
        self.stop()

    def stop(self) -> None:
        if self._process is not None:
            self.kill9()

    def said(self) -> list[tuple[str, int]]:
        text = self.journal.read_text() if self.journal.exists() else ""
        lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [(what, int(number)) for what, number in lines]

    @property
    def finished(self) -> bool:
        """Whether every number has come to something."""
        over = {number for what, number in self.said() if what != TRIED}
        return self._numbers.stop - 1 in over


class Calls(BrokerCalls):
    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._endpoint = endpoint

    def _address(self) -> str:
        return self._endpoint


@pytest.mark.parametrize(
    ("count", "kills", "language"),
    [
        pytest.param(120, 3, "python", marks=pytest.mark.more),
        pytest.param(120, 3, "node", marks=pytest.mark.heavy),
        pytest.param(1_000, 12, "python", marks=pytest.mark.long),
        pytest.param(200, 4, "node", marks=pytest.mark.long),
        pytest.param(200, 4, "java", marks=pytest.mark.long),
        pytest.param(10_000, 60, "python", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(900)  # the first run may install a client
def test_each_transaction_has_its_one_end_whoever_is_killed(
    tmp_path: Path, count: int, kills: int, language: str
) -> None:
    program = program_of(language)
    dice = random.Random(SEED)
    cluster = Cluster(tmp_path, proxies=2, settings=SETTINGS)
    for proxy in cluster.proxies:  # where its clients find it again
        proxy.settings["POPMQ_PROXY_LISTEN"] = f"{LOCAL}:{free_port()}"
    with cluster:
        cluster.popmq("topic", "create", TOPIC, "--type", "transaction")
        half = count // 2
        producers = [
            Producer("one", tmp_path, cluster.endpoints[0], range(half), program),
            Producer("two", tmp_path, cluster.endpoints[1], range(half, count), program),
        ]
        with producers[0], producers[1]:
            killed = kill_about(cluster, producers, dice, kills)
            rest_s = max(120, count / 20)
            wait_for(
                lambda: all(producer.finished for producer in producers), rest_s, "the producers"
            )
        # It is asked about the others' half messages once it has sent one of its own.
        last = Producer("three", tmp_path, cluster.endpoints[0], range(count, count + 1), program)
        producers.append(last)
        with last:
            wait_for(lambda: last.finished, SETTLED_S, "the last producer's transaction")
            wait_for(
                lambda: cluster.broker.metric("popmq_half_messages") == 0,
                SETTLED_S,
                "an end of every half message",
            )
        seen = audit(cluster.endpoints[1])
    lines = [line for producer in producers for line in producer.said()]
    by_what = {
        what: {number for word, number in lines if word == what}
        for what in (TRIED, SENT, ENDED, FAILED)
    }
    print(
        f"\nseed {SEED}: {count} transactions, {len(by_what[SENT])} half messages answered, "
        f"{len(by_what[ENDED])} ended by their producers, {len(by_what[FAILED])} failed; "
        f"killed {dict(sorted(Counter(killed).items()))}; {len(seen)} messages delivered"
    )
    assert len(by_what[TRIED]) == count + 1
    wrong = {number for number in seen if not is_committed(number)}
    assert wrong == set(), "rolled back, or never ended, and seen"
    missing = {number for number in by_what[SENT] if is_committed(number)} - set(seen)
    assert missing == set(), "committed, and never seen"
    assert [number for number, times in seen.items() if times > 1] == []
    assert set(seen) <= by_what[TRIED]


def program_of(language: str) -> list[str]:
    if language == "python":
        return [sys.executable, "-m", "e2e.transaction_client"]
    if language == "java":
        return java_program("Transactions")
    ensure_node_client()
    return [launch_node("producer")[0], str(HERE / "node" / "transactions.mjs")]


def database_in(folder: Path) -> Path:
    """What becomes of each number, for producers in other languages."""
    path = folder / "database.json"
    numbers = range(10_001)
    decided = {
        "committed": list(filter(is_committed, numbers)),
        "forgotten": list(filter(is_forgotten, numbers)),
    }
    path.write_text(json.dumps(decided))
    return path


def kill_about(
    cluster: Cluster, producers: list[Producer], dice: random.Random, kills: int
) -> list[str]:
    """One part after the other, among them each kind at least once."""
    kinds = ["broker", "proxy", "producer"]
    order = [*kinds, *(dice.choice(kinds) for _ in range(kills - len(kinds)))]
    dice.shuffle(order)
    begun = 0
    apart = max(5, sum(len(producer._numbers) for producer in producers) // (2 * kills))
    for kind in order:
        # Between kills some transactions are begun, so that each meets some on their way.
        target = begun + dice.randrange(5, apart + 1)
        wait_for(lambda at=target: tried(producers) >= at, 60, "transactions")
        if kind == "broker":
            cluster.broker.kill9()
            cluster.broker.restart()
        elif kind == "proxy":
            proxy = dice.choice(cluster.proxies)
            proxy.kill9()
            proxy.restart()
        else:
            producer = dice.choice(producers)
            producer.kill9()
            producer.start()
        begun = tried(producers)
        if begun >= sum(len(producer._numbers) for producer in producers) - 10:
            break
    return order


def tried(producers: list[Producer]) -> int:
    return sum(what == TRIED for producer in producers for what, _ in producer.said())


def wait_for(done: object, within_s: float, what: str) -> None:
    assert callable(done)
    end = time.monotonic() + within_s
    while not done():
        if time.monotonic() > end:
            raise RoleFailed(f"no {what} within {within_s:g} s")
        time.sleep(0.02)


def audit(endpoint: str) -> Counter[int]:
    """All that is in the topic, by a group that reads it afterwards."""
    calls, seen = Calls(endpoint), Counter[int]()
    empty = 0
    while empty < 3:
        try:
            messages = calls.receive(TOPIC, AUDITOR, wait="300ms", invisible="300s")
        except PopmqError:
            continue
        empty = 0 if messages else empty + 1
        for message in messages:
            assert message.attempt == 1
            seen[int(message.body)] += 1
    return seen
