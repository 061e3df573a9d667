"""Plots from a Prometheus, which may be silent, slow, wrong or hostile."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from console.console_site import Site, until
from console.test_console_login import in_session, make_ann
from console.test_console_safety import unexpected_markup

from popmq.common.errors import ConfigError
from popmq.common.settings.settings import load_settings
from popmq.common.signing import Signer
from popmq.console.prometheus import label
from popmq.testing.running_broker import RunningBroker

pytestmark = pytest.mark.more

Answer = tuple[int, bytes]


class Server:
    """Answers each query with `answer`; keeps the queries."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.queries = answer, list[dict[str, list[str]]]()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.queries.append(parse_qs(urlsplit(self.path).query))
                status, content = server.answer
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


@contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    server = Server(answer)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        thread.join(10)
        server.http.server_close()


def matrix(*values: float | str) -> Answer:
    points = [[1_700_000_000 + 60 * at, str(value)] for at, value in enumerate(values)]
    data = {"resultType": "matrix", "result": [{"metric": {}, "values": points}]}
    return 200, json.dumps({"status": "success", "data": data}).encode()


@pytest.fixture(scope="module", autouse=True)
def traffic(broker: RunningBroker) -> None:
    broker.send("orders", b"one")
    broker.receive("orders", "billing")


def test_pages_plot_what_prometheus_has_of_their_group_or_topic(broker: RunningBroker) -> None:
    with (
        serving(matrix(1, "NaN", 7, 3)) as server,
        Site(broker.endpoint, prometheus=server.url) as site,
    ):
        for path, figures in (("/", 3), ("/groups/billing", 3), ("/topics/orders?hours=24", 2)):
            page = site.get(path).page
            assert "From Prometheus" in page.text
            assert page.tags.count("svg") == figures, path
            assert "at most 7" in page.text
        queries = {query["query"][0] for query in server.queries}
        assert 'sum(rate(popmq_group_messages_acked_total{group="billing"}[5m]))' in queries
        assert 'sum(rate(popmq_messages_in_total{topic="orders"}[5m]))' in queries
        day = [query for query in server.queries if 'topic="orders"' in query["query"][0]]
        assert {int(q["end"][0]) - int(q["start"][0]) for q in day} == {24 * 3_600}


def test_open_pages_share_what_prometheus_answered(broker: RunningBroker) -> None:
    with serving(matrix(1, 2)) as server, Site(broker.endpoint, prometheus=server.url) as site:
        for _ in range(10):
            site.get("/")
        assert len(server.queries) <= 10  # five queries, and five more if the time went on


def test_a_page_waits_a_second_at_most_for_a_prometheus_that_is_silent(
    broker: RunningBroker,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Site(broker.endpoint, prometheus=url) as site:
            began_s = time.monotonic()
            page = site.get("/").page
            assert time.monotonic() - began_s < 2.5  # with what the brokers take
            assert f"{url} (console.prometheus): no answer within 1 s" in page.text
            assert "Healthy" in page.text
            began_s = time.monotonic()
            site.get("/topics/orders")
            site.get("/")
            assert time.monotonic() - began_s < 2.5


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((503, b"<b>away</b>"), "status 503"),
        ((200, b"<html>"), "the answer is none of Prometheus"),
        ((200, b'{"data": {"result": [{"values": [1]}]}}'), "the answer is none of Prometheus"),
        ((200, b"x" * (5 << 20)), "the answer has more than 4194304 bytes"),
        ((200, b'{"data": {"result": []}}'), "It has no values of this time."),
    ],
)
def test_what_is_no_good_answer_is_said_in_words(
    answer: Answer, words: str, broker: RunningBroker
) -> None:
    with serving(answer) as server, Site(broker.endpoint, prometheus=server.url) as site:
        page = until(lambda: site.get("/").page, lambda page: words in page.text)
        assert not unexpected_markup(page)


def test_a_prometheus_that_refuses_is_said_without_numbers_of_the_system(
    broker: RunningBroker,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with Site(broker.endpoint, prometheus=url) as site:
        assert f"{url} (console.prometheus): Connection refused" in site.get("/").page.text


def test_a_user_who_may_not_see_the_cluster_sees_no_figures_of_all_of_it() -> None:
    with (
        RunningBroker(users=True) as broker,
        serving(matrix(1, 2)) as server,
        Site(broker.endpoint, prometheus=server.url) as site,
    ):
        ann = make_ann(broker)
        broker.send("orders", b"one")
        admin = in_session(site, Signer(broker.access_key, broker.secret))
        hers = in_session(site, ann)
        for path in ("/", "/topics/orders"):
            assert "From Prometheus" in site.get(path, cookie=admin).page.text
            assert "From Prometheus" not in site.get(path, cookie=hers).page.text


def test_names_are_strings_of_the_query_whatever_they_are() -> None:
    assert label('a"} or up{x="\\') == r'"a\"} or up{x=\"\\"'
    assert label("a\nb") == r'"a\nb"'


@pytest.mark.parametrize(
    "value",
    ["prometheus:9090", "ftp://a", "http://", "http://a:b", "http://user:secret@a", "file:///etc"],
)
def test_what_is_no_address_of_prometheus_is_refused_with_the_settings_name(value: str) -> None:
    with pytest.raises(ConfigError, match=r"console\.prometheus"):
        load_settings(None, {"POPMQ_CONSOLE_PROMETHEUS": value}, {})
    good = load_settings(None, {}, {"console.prometheus": "https://prometheus.example/p"})
    assert good.settings.console.prometheus == "https://prometheus.example/p"
