"""What a proxy tells the brokers about its clients, with real brokers behind it."""

import asyncio
from collections.abc import Mapping

from popmq.broker.deliveries.client_liveness import client_number
from popmq.common.clock import SystemClock
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, OnReply, Port
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.messaging.client_directory import ClientDirectory
from popmq.proxy.messaging.client_reporter import ADDRESSES_LIMIT, ClientAddresses, ClientReporter
from popmq.testing.harness.clock import ManualClock
from popmq.testing.harness.core_broker import CoreBroker, pop


class _Telling:
    """The way to a real broker that says when a request went by."""

    def __init__(self, port: Port, event: asyncio.Event) -> None:
        self._port = port
        self._told = event

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        number = self._port.request(kind, body, timeout_ms, on_reply)
        self._told.set()
        return number

    def cancel(self, request_id: int) -> None:
        self._port.cancel(request_id)


def alive(core: CoreBroker, client_id: str) -> bool:
    broker = core.broker
    return broker.deliveries.liveness.is_alive(client_number(client_id), broker.store.log_ms())


def deaf(ports: Mapping[str, Port]) -> ClientReporter:
    """None of them listens."""
    return ClientReporter(
        StaticBrokers(ports),
        ClientDirectory(ManualClock()),
        SystemClock(),
        lambda: "127.0.0.1:8081",
        lambda client_id: False,
        lambda client_id, names: None,
    )


async def test_every_broker_learns_once_a_second_whom_the_proxy_heard() -> None:
    cores = [CoreBroker(), CoreBroker()]
    for core in cores:
        core.advance(31_000)  # the grace of the start is over
    assert not any(alive(core, "client-1") for core in cores)
    event = asyncio.Event()
    last = _Telling(cores[1].server, event)
    clients = deaf({"a": cores[0].server, "b": last})
    clients.start()
    clients.mark_seen("client-1")
    await asyncio.wait_for(event.wait(), 5)
    assert all(alive(core, "client-1") for core in cores)
    assert not alive(cores[0], "client-2")
    clients.stop()


def test_a_good_bye_counts_from_the_address_of_the_clients_calls_only() -> None:
    clients = deaf({})
    assert not clients.may_close("me", "10.0.0.1:1")
    clients.mark_seen("me", "10.0.0.1:1")
    clients.mark_seen("me", "10.0.0.2:1")
    assert clients.may_close("me", "10.0.0.1:2")  # a new connection from there is the same client
    assert not clients.may_close("me", "10.0.0.2:1")


def test_a_client_has_another_address_after_thirty_seconds_without_a_call() -> None:
    clock = ManualClock()
    addresses = ClientAddresses(clock)
    addresses.on_call("me", "10.0.0.1")
    for _ in range(3):
        clock.advance(20_000)
        addresses.on_call("me", "10.0.0.2")
        addresses.on_call("me", "10.0.0.1")
    assert addresses.is_from("me", "10.0.0.1")
    clock.advance(30_000)
    addresses.on_call("me", "10.0.0.2")
    assert addresses.is_from("me", "10.0.0.2")
    assert not addresses.is_from("me", "10.0.0.1")


def test_the_number_of_remembered_addresses_is_bounded() -> None:
    addresses = ClientAddresses(ManualClock())
    for number in range(ADDRESSES_LIMIT + 1):
        addresses.on_call(f"client-{number}", "10.0.0.1")
    assert not addresses.is_from("client-0", "10.0.0.1")
    assert addresses.is_from("client-1", "10.0.0.1")


def test_a_good_bye_reaches_the_broker_at_once_and_hands_back_what_was_held() -> None:
    core = CoreBroker()
    core.topic("orders")
    core.send("orders", b"one")
    core.reply(Kind.POP, pop("orders", "g", auto_renew=True, invisible_ms=0))
    deaf({"a": core.server}).on_client_closed("a-client")
    core.advance(50)
    assert len(core.receive("orders", "g")) == 1


def test_more_clients_than_fit_one_report_are_told_in_several() -> None:
    core = CoreBroker()
    core.advance(31_000)
    clients = deaf({"a": core.server})
    for number in range(2_500):
        clients.mark_seen(f"client-{number}")
    clients.stop()
    assert all(alive(core, f"client-{number}") for number in (0, 999, 1_000, 2_499))


def test_a_report_survives_the_way_to_the_broker() -> None:
    for described in (b"", b"what is known of them"):
        report = hop.ClientsReport(["a", "ü"], ["gone"], ["ü"], described)
        assert hop.decode_clients(hop.encode_clients(report)) == report
    from_before = hop.encode_clients(hop.ClientsReport(["a"], ["gone"]))[:-2]
    assert hop.decode_clients(from_before) == hop.ClientsReport(["a"], ["gone"], [])
