"""What a broker holds of the clients that proxies described, and its bounds."""

import random

import pytest

from popmq.broker.deliveries import described_clients
from popmq.broker.deliveries.described_clients import KEEP_MS, DescribedClients
from popmq.broker.handlers import client_requests
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import ClientsReport, Kind
from popmq.common.wire import admin_pb2 as pb
from popmq.common.wire.lite_pb2 import LiteNotices
from popmq.testing.harness.core_broker import CoreBroker
from popmq.testing.harness.invariants import broken_invariant


def report(
    core: CoreBroker,
    *client_ids: str,
    alive: tuple[str, ...] = (),
    proxy: str = "p",
    version: str = "",
) -> list[str]:
    """A proxy describes clients; the ids that the broker asks for."""
    clients = [pb.ConnectedClient(client_id=name, version=version) for name in client_ids]
    described = pb.DescribedClients(proxy=proxy, clients=clients).SerializeToString()
    body = hop.encode_clients(ClientsReport(alive=alive, described=described))
    answer = LiteNotices.FromString(core.reply(Kind.CLIENTS, body))
    assert not broken_invariant(core.broker)
    return list(answer.undescribed)


def listed(core: CoreBroker, after: str = "") -> pb.ListClientsReply:
    body = pb.ListClientsRequest(after=after).SerializeToString()
    return pb.ListClientsReply.FromString(core.reply(Kind.LIST_CLIENTS, body))


def test_a_broker_asks_for_the_clients_that_it_lacks_and_for_no_others() -> None:
    core = CoreBroker()
    assert report(core, "a", alive=("a", "b")) == ["b"]
    assert report(core, "b", alive=("a", "b")) == []
    assert report(core, alive=("a",), proxy="q") == ["a"], "each proxy describes its own"


def test_a_proxy_of_before_is_asked_for_nothing() -> None:
    core = CoreBroker()
    body = hop.encode_clients(ClientsReport(alive=["a"]))
    assert core.reply(Kind.CLIENTS, body) == b""
    assert not listed(core).clients


def test_a_description_stays_as_long_as_its_client_is_heard() -> None:
    core = CoreBroker()
    report(core, "a", "b")
    core.advance(KEEP_MS - 1_000)
    report(core, alive=("b",))
    core.advance(2_000)
    (client,) = listed(core).clients
    assert (client.client_id, client.connections[0].silent_ms) == ("b", 2_000)
    core.advance(KEEP_MS)
    assert not listed(core).clients


def test_a_full_table_keeps_what_it_has_and_asks_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(described_clients, "DESCRIPTIONS_LIMIT", 3)
    core = CoreBroker()
    report(core, *"abc")
    assert report(core, *"de", alive=tuple("abcde")) == []
    reply = listed(core)
    assert [client.client_id for client in reply.clients] == ["a", "b", "c"]
    assert "which is its limit: there may be more clients" in reply.incomplete
    report(core, "a", version="2")  # one that is known may change
    assert listed(core).clients[0].version == "2"


def test_a_long_list_comes_in_pages_that_have_each_client_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = CoreBroker()
    names = [f"client-{number:03}" for number in range(600)]
    for proxy in ("p", "q"):  # a client's two descriptions are on one page
        report(core, *names, proxy=proxy)
    monkeypatch.setattr(client_requests, "LIST_BYTES", 2_000)
    shown: list[str] = []
    after, pages = "", 0
    while after or not pages:
        reply = listed(core, after)
        page = [client.client_id for client in reply.clients]
        assert page[::2] == page[1::2]
        shown += page[::2]
        after, pages = reply.until, pages + 1
        assert reply.until in ("", page[-1])
    assert shown == names
    assert 5 < pages < 40


def test_any_order_of_reports_keeps_the_table_within_its_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(described_clients, "DESCRIPTIONS_LIMIT", 20)
    monkeypatch.setattr(described_clients, "BYTES_LIMIT", 1_000)
    table, now_ms = DescribedClients(), 0
    for _ in range(3_000):
        client, proxy = f"c{rng.randrange(30)}", f"p{rng.randrange(3)}"
        match rng.randrange(6):
            case 0 | 1:
                table.put(client, proxy, rng.randbytes(rng.randrange(120)), now_ms)
            case 2:
                table.mark_seen(client, proxy, now_ms)
            case 3:
                table.on_left(client, proxy)
            case 4:
                table.on_client_closed(client)
            case _:
                now_ms += rng.randrange(10_000)
                table.forget(now_ms)
                assert all(now_ms - item.heard_ms <= KEEP_MS for _, item in table.items())
        table.check_invariants()
        assert len(table.items()) <= 20
