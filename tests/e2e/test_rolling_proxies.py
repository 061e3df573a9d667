"""Proxies are replaced one after the other while sixteen official clients are at work.

Clients know one address, as of a Service: new connections go to the proxies that are ready.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from e2e.balancer import Balancer
from e2e.flow import command, has, percentiles, sent_after
from e2e.official import START_S, OfficialClient, ensure_node_client
from e2e.processes import Cluster

TOPIC, LATER = "flow", "flow-later"
EACH = 8  # clients of each language, which share a group
PAUSE_S = 0.5  # of each of four senders of a client
INVISIBLE_S = 10
GOES_ON_S = 30.0
SETTLED_S = 90.0

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(1, marks=[pytest.mark.heavy, pytest.mark.timeout(400)]),
        pytest.param(10, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_sixteen_official_clients_notice_no_rolling_restart_of_the_proxies(
    tmp_path: Path, rounds: int
) -> None:
    ensure_node_client()
    roll(tmp_path, rounds, "python", "node", each=EACH)


@pytest.mark.long
@pytest.mark.timeout(900)  # the first run builds the client
def test_four_java_clients_notice_no_rolling_restart_of_the_proxies(tmp_path: Path) -> None:
    roll(tmp_path, 2, "java", each=4)


def roll(folder: Path, rounds: int, *languages: str, each: int) -> None:
    with rolling(folder, *languages, each=each) as (cluster, balancer, clients):
        restarts = [
            replace_proxy(cluster, balancer, clients, number)
            for _ in range(rounds)
            for number in range(len(cluster.proxies))
        ]
        settle(clients)
        stored = sum(
            cluster.broker.metric(f'popmq_messages_in_total{{topic="{topic}"}}')
            for topic in (TOPIC, LATER)
        )
    sent = [manifest["name"] for client in clients for manifest in client.of("sent")]
    failed = [manifest for client in clients for manifest in client.of("send_failed")]
    print(
        f"\n{len(restarts)} restarts of {len(cluster.proxies)} proxies, {len(clients)} clients on "
        f"{balancer.accepted} connections: {len(sent)} sent, {len(failed)} failed, {stored} stored"
    )
    for what in ("sent", "seen"):
        gaps = [pause_ms(client, what, *restart) for client in clients for restart in restarts]
        print(f"longest pause of a client between two {what}: {percentiles(gaps)}")
    gaps = [pause_ms(None, "seen", *restart, clients) for restart in restarts]
    print(f"longest pause in which nobody received: {percentiles(gaps)}")
    assert failed == []
    assert len(set(sent)) == len(sent)
    assert stored == len(sent), "a resend was stored again"
    for group in groups(clients).values():
        got = {manifest["name"] for client in group for manifest in client.of("seen")}
        assert sorted(set(sent) - got) == []
    assert [manifest["error"] for client in clients for manifest in client.of("ack_failed")] == []


@contextmanager
def rolling(
    folder: Path, *languages: str, each: int
) -> Iterator[tuple[Cluster, Balancer, list[OfficialClient]]]:
    with ExitStack() as stack:
        settings = {"POPMQ_POP_INVISIBLE_DEFAULT_MS": f"{INVISIBLE_S * 1_000}"}
        cluster = stack.enter_context(Cluster(folder, proxies=2, settings=settings))
        cluster.popmq("topic", "create", TOPIC)
        cluster.popmq("topic", "create", LATER, "--type", "delay")
        balancer = stack.enter_context(Balancer(*cluster.endpoints))
        clients = []
        for language in languages:
            cluster.popmq("group", "create", f"flow-{language}")
            for number in range(each):
                client = OfficialClient(f"{language}-{number}", command(language), folder=folder)
                clients.append(stack.enter_context(client))
                client.tell(
                    op="start",
                    endpoint=balancer.address,
                    name=client.name,
                    topic=TOPIC,
                    later=LATER,
                    group=f"flow-{language}",
                    invisible_s=INVISIBLE_S,
                    pause_s=PAUSE_S,
                )
        for client in clients:
            client.wait(partial(has, client, "ready", 1), "being ready", within_s=2 * START_S)
        for client in clients:
            client.tell(op="go")
        for client in clients:
            client.wait(partial(has, client, "sent", 4), "4 sends", within_s=START_S)
        yield cluster, balancer, clients


def replace_proxy(
    cluster: Cluster, balancer: Balancer, clients: list[OfficialClient], number: int
) -> tuple[int, int]:
    """Wall times (ms) around it, up to the next sends of all clients."""
    proxy = cluster.proxies[number]
    began_ms = time.time_ns() // 1_000_000
    balancer.ready.remove(proxy.ready.endpoint)
    proxy.terminate()
    proxy.restart()
    balancer.ready.append(proxy.ready.endpoint)
    ended_ms = time.time_ns() // 1_000_000
    for client in clients:
        went_on = partial(sent_after, client, ended_ms)
        client.wait(went_on, "a send after the restart", within_s=GOES_ON_S)
    return began_ms, time.time_ns() // 1_000_000


def settle(clients: list[OfficialClient]) -> None:
    """No more sends; every group has seen all that were acknowledged."""
    for client in clients:
        client.tell(op="quiet")
    for client in clients:
        client.wait(partial(has, client, "done", 1), "the last send", within_s=GOES_ON_S)
    owed = {manifest["name"] for client in clients for manifest in client.of("sent")}
    for group in groups(clients).values():
        deadline_s = time.monotonic() + SETTLED_S
        for client in itertools.cycle(group):
            if owed <= {manifest["name"] for each in group for manifest in each.of("acked")}:
                break
            assert time.monotonic() < deadline_s, f"{client.name}: not all was acknowledged"
            client.comes(partial(has, client, "acked", client.count("acked") + 1), within_s=0.2)


def groups(clients: list[OfficialClient]) -> dict[str, list[OfficialClient]]:
    official_clients: dict[str, list[OfficialClient]] = {}
    for client in clients:
        official_clients.setdefault(client.name.split("-")[0], []).append(client)
    return official_clients


def pause_ms(
    client: OfficialClient | None,
    what: str,
    began_ms: int,
    ended_ms: int,
    clients: list[OfficialClient] | None = None,
) -> int:
    """The longest time around a restart between two such events, of one client or of all."""
    official_clients = [client] if client is not None else clients or []
    at = sorted(manifest["at_ms"] for each in official_clients for manifest in each.of(what))
    at = [ms for ms in at if began_ms - 1_000 <= ms <= ended_ms + 1_000]
    return max((later - sooner for sooner, later in itertools.pairwise(at)), default=0)
