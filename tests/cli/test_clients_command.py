"""`popmq clients`: what it shows, at which width, and what it says where there is nothing."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from cli.parsing import parsed

from popmq.broker.handlers import client_requests
from popmq.cli.__main__ import main
from popmq.cli.client import CallFailed, Client
from popmq.cli.clients import client_lines, client_rows, list_clients, member_lines
from popmq.common.wire import admin_pb2 as admin
from popmq.testing.running_broker import RunningBroker

NOW_MS = 1_700_000_100_000


def group(name: str, *topics: str) -> admin.ClientGroup:
    subscriptions = [admin.ClientSubscription(topic=topic, filter="eu") for topic in topics]
    return admin.ClientGroup(name=name, subscriptions=subscriptions)


def at(proxy: str, silent_ms: int = 1_200) -> admin.ClientConnection:
    return admin.ClientConnection(
        proxy=proxy, address="10.0.0.9:4711", since_ms=NOW_MS - 90_000, silent_ms=silent_ms
    )


FOUND = admin.ListClientsReply(
    clients=[
        admin.ConnectedClient(
            client_id="host@17@0@abcdef",
            language="JAVA",
            version="5.0.7",
            protocol="grpc",
            kind="push consumer",
            groups=[group("workers", "orders", "bills", "letters")],
            connections=[at("proxy-1:8081"), at("proxy-2:8081", 9_000)],
        ),
        admin.ConnectedClient(
            client_id="host@18@0@abcdef",
            topics=["orders"],
            shortened=True,
            connections=[at("proxy-2:8081", 0)],
        ),
    ],
    now_ms=NOW_MS,
)


def test_a_client_is_a_row_with_its_connection_that_was_heard_last() -> None:
    (table,) = client_lines(FOUND, wide=True)
    header, first, second = (line.split() for line in table.splitlines())
    names = ["CLIENT", "KIND", "GROUP", "TOPICS", "LANGUAGE", "VERSION", "PROTOCOL"]
    assert header == [*names, "ADDRESS", "PROXY", "SINCE", "HEARD"]
    assert first[:5] == ["host@17@0@abcdef", "push", "consumer", "workers", "orders,bills,letters"]
    assert first[5:8] == ["java", "5.0.7", "grpc"]
    assert first[8:] == ["10.0.0.9:4711", "+1", "proxy-1:8081", "+1", "1m", "1s"]
    assert second[1:8] == ["-", "-", "orders", "...", "-", "-", "-"]
    assert second[8:] == ["10.0.0.9:4711", "proxy-2:8081", "1m", "now"]


@pytest.mark.parametrize("width", [80, 140])
def test_on_a_narrow_terminal_less_important_columns_are_left_out(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    (table,) = client_lines(FOUND)
    lines = table.splitlines()
    assert max(map(len, lines)) <= width
    assert ("ADDRESS" in lines[0]) == (width == 140)
    assert "PROXY" in lines[0]
    if width == 140:
        assert "orders,bills +1" in lines[1]
    (members,) = member_lines(FOUND)
    assert max(map(len, members.splitlines())) <= width


def test_as_json_a_client_has_all_its_subscriptions_and_connections() -> None:
    first, second = json.loads(json.dumps(client_rows(FOUND)))
    (workers,) = first["groups"]
    assert workers["name"] == "workers"
    assert workers["subscriptions"][2] == {"topic": "letters", "filter": "eu"}
    assert [item["silent_ms"] for item in first["connections"]] == [1_200, 9_000]
    assert first["connections"][0]["since_ms"] == NOW_MS - 90_000
    assert (second["topics"], second["kind"], second["shortened"]) == (["orders"], "", True)


def test_a_client_that_only_called_is_counted_and_shown_with_all_columns() -> None:
    clients = [
        admin.ConnectedClient(client_id="calls"),
        admin.ConnectedClient(client_id="sends", kind="producer"),
    ]
    table, hidden = client_lines(admin.ListClientsReply(clients=clients))
    assert "sends" in table
    assert "calls" not in table
    assert hidden == "1 client without them called in the last minute (-o wide shows them)"
    assert "calls" in "".join(client_lines(admin.ListClientsReply(clients=clients), wide=True))


def test_text_of_a_client_moves_no_cursor() -> None:
    reply = admin.ListClientsReply(
        clients=[admin.ConnectedClient(client_id="a\x1b[2J\n", kind="producer")]
    )
    assert "a\\x1b[2J\\n" in client_lines(reply)[0]


def test_a_connected_client_is_listed_and_so_it_is_in_its_namespace(
    popmq_broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = ("--endpoint", popmq_broker.endpoint)
    with (
        Client(popmq_broker.endpoint, "here@1") as here,
        Client(popmq_broker.endpoint, "there@1") as there,
    ):
        deadline_s = time.monotonic() + 20
        shown: list[str] = []
        while shown != ["here@1", "there@1"]:  # proxies report once a second
            assert time.monotonic() < deadline_s, f"not listed: {shown}"
            here.heartbeat("eu%workers")
            there.heartbeat("us%workers")
            reply = list_clients(here, parsed("clients", *endpoint))
            shown = [client.client_id for client in reply.clients]
        assert main(["clients", "--namespace", "us", *endpoint]) == 0
        printed = capsys.readouterr().out
        assert "there@1" in printed
        assert "here@1" not in printed.replace("there@1", "")
        assert (
            main(["clients", "--group", "workers", "--namespace", "eu", "--json", *endpoint]) == 0
        )
        (row,) = map(json.loads, capsys.readouterr().out.splitlines())
        assert (row["client_id"], row["kind"]) == ("here@1", "simple consumer")


def test_recv_with_follow_is_listed_as_a_consumer_of_its_group(popmq_broker: RunningBroker) -> None:
    endpoint = ("--endpoint", popmq_broker.endpoint)
    assert main(["topic", "create", "orders", *endpoint]) == 0
    follow = ["recv", "orders", "--group", "readers", "--follow", "--count", "1", *endpoint]
    with ThreadPoolExecutor() as pool, Client(popmq_broker.endpoint) as client:
        receiving = pool.submit(main, follow)
        deadline_s = time.monotonic() + 20
        kinds: list[str] = []
        try:
            while not kinds:  # proxies report once a second
                assert time.monotonic() < deadline_s, "not listed"
                reply = list_clients(client, parsed("clients", "--group", "readers", *endpoint))
                kinds = [listed.kind for listed in reply.clients]
        finally:
            popmq_broker.send("orders", b"one")  # ends the receive
        assert receiving.result(20) == 0
    assert kinds == ["simple consumer"]


@pytest.mark.more
def test_a_list_of_many_pages_is_shown_whole(
    popmq_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_requests, "LIST_BYTES", 200)
    names = [f"client-{number:02}" for number in range(20)]
    args = parsed("clients", "--endpoint", popmq_broker.endpoint)
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(popmq_broker.endpoint, name)) for name in names]
        deadline_s = time.monotonic() + 20
        shown: list[str] = []
        while shown != names:  # proxies report once a second
            assert time.monotonic() < deadline_s, f"listed are {shown}"
            for client in clients:
                client.heartbeat("workers")
            reply = list_clients(clients[0], args)
            shown = [listed.client_id for listed in reply.clients]
        request = admin.ListClientsRequest()
        first = clients[0].call_admin(request, admin.ListClientsReply)
    assert 0 < len(first.clients) < 10


def test_where_no_client_is_the_text_says_so(
    popmq_broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = ("--endpoint", popmq_broker.endpoint)
    assert main(["group", "create", "lonely", *endpoint]) == 0
    capsys.readouterr()
    assert main(["clients", "--group", "lonely", *endpoint]) == 0
    assert capsys.readouterr().out == "no client of group lonely is connected\n"
    assert main(["clients", "--group", "lonley", *endpoint]) == 4
    assert "did you mean lonely?" in capsys.readouterr().err


def test_a_proxy_that_does_not_know_a_command_is_named(popmq_broker: RunningBroker) -> None:
    with Client(popmq_broker.endpoint) as client, pytest.raises(CallFailed) as failure:
        client.call_admin(admin.LagPair(), admin.LagReply)
    text = f"{popmq_broker.endpoint} does not serve LagPair: its popmq is too old"
    assert str(failure.value) == text
