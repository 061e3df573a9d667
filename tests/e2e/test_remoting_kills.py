"""Java push consumers over Remoting while proxies and masters are killed.

Each kill is followed at once by messages, which are sent until they are answered OK, and the
process starts again at its address, as a supervisor starts it.  E2E_SEED repeats a run's choices.
"""

import asyncio
import contextlib
import os
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest
from e2e.official_java import remoting_program
from e2e.processes import LOCAL, Role, free_port
from e2e.remoting_programs import ConsumerProgram
from e2e.replicated import GroupClient, ReplicatedGroup

from popmq.cli.client import CallFailed, CallRefused, Client
from popmq.proxy.api import definition_pb2 as pb

SEED = int(os.environ.get("E2E_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
TOPIC = "orders"
MESSAGES = 16  # after each kill
WHOLE_S = 5.0
WAIT_S = 60.0

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]


class Traffic:
    """Messages with a body of their own, and which of them some consumer got."""

    def __init__(self, endpoints: list[str], consumers: list[ConsumerProgram]) -> None:
        self._clients = [Client(endpoint) for endpoint in endpoints]
        self._consumers = consumers
        self.acknowledged: list[str] = []

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def send(self, count: int) -> list[str]:
        """Each is sent until it is answered OK, through the proxies in turn."""
        bodies = [f"order-{len(self.acknowledged) + number}" for number in range(count)]
        for body in bodies:
            self._send(body)
        self.acknowledged += bodies
        return bodies

    def _send(self, body: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        number = len(self.acknowledged)
        while True:
            number += 1
            system = pb.SystemProperties(
                message_id=f"{SEED:08X}{time.monotonic_ns():026X}", body_encoding=pb.IDENTITY
            )
            message = pb.Message(
                topic=pb.Resource(name=TOPIC), system_properties=system, body=body.encode()
            )
            with suppress(CallRefused, CallFailed):
                self._clients[number % len(self._clients)].send(message)
                return
            assert time.monotonic() < deadline_s, f"{body} was never answered OK"

    def missing(self, bodies: list[str]) -> set[str]:
        got = {event["body"] for consumer in self._consumers for event in consumer.got()}
        return set(bodies) - got

    def flow_again(self, what: str, begin_s: float) -> float:
        """Seconds from the kill until all messages that were sent after it are with consumers."""
        bodies = self.send(MESSAGES)
        deadline_s = begin_s + WAIT_S
        while missing := self.missing(bodies):
            assert time.monotonic() < deadline_s, f"{what}: {missing}"
            time.sleep(0.02)  # between two looks
        return time.monotonic() - begin_s


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.long)])
def test_consumers_get_every_message_and_go_on_within_seconds_of_each_kill(
    kills: int, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        group = ReplicatedGroup(tmp_path, proxies=2)
        for proxy in group.proxies:  # which it has after a restart too
            proxy.settings["POPMQ_PROXY_LISTEN"] = f"{LOCAL}:{free_port()}"
        stack.enter_context(group)
        master_in_sync(group)
        group.create(topic=TOPIC, groups=["workers"])
        third = consumer(group, "4.9.8")
        consumers = [consumer(group, "4.9.8"), consumer(group, "5.5.0"), third]
        for program in consumers[:2]:
            stack.enter_context(program)
            program.wait_started()
        traffic = stack.enter_context(contextlib.closing(Traffic(group.endpoints, consumers)))
        traffic.flow_again("before any kill", time.monotonic())
        dice, took_s = random.Random(SEED), {"proxy": list[float](), "master": list[float]()}
        for number in range(kills):
            with third if number == kills // 2 else contextlib.nullcontext() as joined:
                if joined is not None:  # it takes some of the queues
                    third.wait_started()
                proxy, master = dice.choice(group.proxies), master_in_sync(group)
                begin_s = time.monotonic()
                proxy.kill9()
                proxy.restart()
                took_s["proxy"].append(traffic.flow_again(f"proxy {number}", begin_s))
                begin_s = time.monotonic()
                master.kill9()
                took_s["master"].append(traffic.flow_again(f"master {number}", begin_s))
                master.restart()  # another broker leads
        print(f"seed {SEED}, {len(traffic.acknowledged)} acknowledged")
        for kind, times in took_s.items():
            shown = " ".join(f"{took:.2f}" for took in times)
            print(f"{kind}: {kills} kills, seconds until all messages were there: {shown}")
        assert traffic.missing(traffic.acknowledged) == set()
        assert max(took_s["proxy"] + took_s["master"]) <= WHOLE_S


def consumer(group: ReplicatedGroup, version: str) -> ConsumerProgram:
    addresses = ";".join(group.endpoints)
    scenario = ("push", "workers", TOPIC, "*")
    return ConsumerProgram([*remoting_program(version), addresses, *scenario])


def master_in_sync(group: ReplicatedGroup) -> Role:
    async def master() -> Role:
        async with GroupClient(group.address) as client:
            return group.master(await client.in_sync(3))

    return asyncio.run(master())
