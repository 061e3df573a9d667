"""What a proxy tells the brokers about its clients, with real brokers behind it."""

import asyncio
from collections.abc import Mapping

from popmq.broker.deliveries.client_liveness import client_number
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, OnReply, Port
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.messaging.client_reporter import ClientReporter
from popmq.testing.harness.core_broker import CoreBroker, pop


class _Telling:
    """The way to a real broker that says when a request went by."""

    def __init__(self, port: Port, told: asyncio.Event) -> None:
        self._port = port
        self._told = told

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        number = self._port.request(kind, body, timeout_ms, on_reply)
        self._told.set()
        return number

    def cancel(self, request_id: int) -> None:
        self._port.cancel(request_id)


def alive(core: CoreBroker, client_id: str) -> bool:
    broker = core.broker
    return broker.liveness.is_alive(client_number(client_id), broker.store.log_ms())


def deaf(ports: Mapping[str, Port]) -> ClientReporter:
    """None of them listens."""
    return ClientReporter(
        StaticBrokers(ports), lambda client_id: False, lambda client_id, names: None
    )


async def test_every_broker_learns_once_a_second_whom_the_proxy_heard() -> None:
    cores = [CoreBroker(), CoreBroker()]
    for core in cores:
        core.advance(31_000)  # the grace of the start is over
    assert not any(alive(core, "client-1") for core in cores)
    heard = asyncio.Event()
    last = _Telling(cores[1].server, heard)
    clients = deaf({"a": cores[0].server, "b": last})
    clients.start()
    clients.mark_seen("client-1")
    await asyncio.wait_for(heard.wait(), 5)
    assert all(alive(core, "client-1") for core in cores)
    assert not alive(cores[0], "client-2")
    clients.stop()


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
    report = hop.ClientsReport(["a", "ü"], ["gone"], ["ü"])
    assert hop.decode_clients(hop.encode_clients(report)) == report
    from_before = hop.encode_clients(hop.ClientsReport(["a"], ["gone"]))[:-2]
    assert hop.decode_clients(from_before) == hop.ClientsReport(["a"], ["gone"], [])
