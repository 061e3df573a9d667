"""Login to the console of a cluster with users: what each session sees, and how it ends."""

from collections.abc import Iterator

import pytest
from console.console_site import Answer, Site, until

from popmq.cli.client import Client
from popmq.common.signing import Signer
from popmq.common.wire import admin_pb2 as admin
from popmq.console.sessions import IDLE_S, LONGEST_S
from popmq.testing.running_broker import RunningBroker

PATHS = ("/", "/groups", "/topics", "/topics/orders", "/timers", "/dead-letters", "/cluster")


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with RunningBroker(users=True) as running:
        for topic in ("orders", "secrets"):
            running.send(topic, f"body of {topic}", keys=["k"])
            running.create_group(f"readers-of-{topic}")
            running.receive(topic, f"readers-of-{topic}")
        yield running


@pytest.fixture
def site(broker: RunningBroker) -> Iterator[Site]:
    with Site(broker.endpoint) as served:
        yield served


@pytest.fixture(scope="module")
def ann(broker: RunningBroker) -> Signer:
    return make_ann(broker)


def make_ann(broker: RunningBroker) -> Signer:
    """She may look at `orders` and its group, and send."""
    entries = [
        admin.UserEntry(resources=["topic:orders"], actions=["get", "list", "sub", "pub"]),
        admin.UserEntry(resources=["group:readers-of-orders"], actions=["get", "list", "sub"]),
    ]
    signer = Signer("ann", "secret-of-ann-0123456789")
    request = admin.CreateUserRequest(name="ann", secret=signer.secret, entries=entries)
    with admin_client(broker) as client:
        client.call_admin(request, admin.UserReply)
    return signer


def admin_client(broker: RunningBroker) -> Client:
    return Client(broker.endpoint, signer=Signer(broker.access_key, broker.secret))


def log_in(site: Site, access_key: str, secret: str, after: str = "/", **headers: str) -> Answer:
    fields = [("next", after), ("access_key", access_key), ("secret", secret)]
    return site.send("/login", fields, **headers)


def cookie_of(answer: Answer) -> str:
    assert answer.status == 303, answer.page.text
    return answer.headers["set-cookie"].partition(";")[0]


def in_session(site: Site, signer: Signer) -> str:
    return cookie_of(log_in(site, signer.access_key, signer.secret))


def test_without_a_session_every_page_leads_to_the_login(site: Site) -> None:
    for path in PATHS:
        answer = site.get(path)
        assert answer.status == 303
        assert answer.headers["location"].startswith("/login?next=")
        assert site.get(path, **{"x-live": "1"}).status == 401
    location = site.get("/settings?q=group").headers["location"]
    assert location == "/login?next=%2Fsettings%3Fq%3Dgroup"
    form = site.get("/login?next=/topics").page.form(next="/topics")
    assert {name for name, _ in form.fields} == {"next", "access_key", "secret"}


def test_a_login_leads_back_and_its_cookie_is_for_the_browser_alone(
    broker: RunningBroker, site: Site
) -> None:
    answer = log_in(site, broker.access_key, broker.secret, "/topics/orders")
    assert (answer.status, answer.headers["location"]) == (303, "/topics/orders")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "secure" not in cookie.split("; ")
    for text in (broker.secret, broker.access_key):
        assert text not in answer.headers["set-cookie"]
    page = site.get("/topics/orders", cookie=cookie_of(answer)).page
    assert "orders" in page.text
    assert "Log out" in page.text


def test_over_tls_the_cookie_is_secure(broker: RunningBroker) -> None:
    with Site(broker.endpoint, any_host=True) as site:
        answer = log_in(
            site,
            broker.access_key,
            broker.secret,
            host="console.example",
            origin="https://console.example",
        )
    assert "Secure" in answer.headers["set-cookie"].split("; ")


@pytest.mark.parametrize("after", ["//evil.example", "/\\evil.example", "https://evil.example", ""])
def test_a_login_leads_to_no_other_site(broker: RunningBroker, site: Site, after: str) -> None:
    answer = log_in(site, broker.access_key, broker.secret, after)
    assert (answer.status, answer.headers["location"]) == (303, "/")


def test_a_session_shows_what_its_user_may_see_and_no_more(
    broker: RunningBroker, site: Site, ann: Signer
) -> None:
    admin_cookie = in_session(site, Signer(broker.access_key, broker.secret))
    cookie = in_session(site, ann)
    for path in PATHS:  # the admin's answers are fresh when she asks
        assert "body of secrets" not in site.get(path, cookie=admin_cookie).page.html
    assert "secrets" in site.get("/topics", cookie=admin_cookie).page.text
    for path in (*PATHS, "/clients", "/settings"):
        for headers in ({}, {"x-live": "1"}):
            text = site.get(path, cookie=cookie, **headers).page.text
            assert "secrets" not in text, path
    assert "orders" in site.get("/topics", cookie=cookie).page.text
    assert "readers-of-orders" in site.get("/groups", cookie=cookie).page.text
    hidden, absent = (
        site.get(f"/topics/{name}", cookie=cookie) for name in ("secrets", "nothing-here")
    )
    assert hidden.status == absent.status == 400
    assert "FORBIDDEN (40300)" in hidden.page.text
    assert hidden.page.text.replace("secrets", "nothing-here") == absent.page.text
    assert "FORBIDDEN (40300)" in site.get("/cluster", cookie=cookie).page.text


def test_live_answers_of_a_user_go_to_no_other_session(
    broker: RunningBroker, site: Site, ann: Signer
) -> None:
    cookies = [in_session(site, Signer(broker.access_key, broker.secret)), in_session(site, ann)]
    texts = [site.get("/topics", cookie=c, **{"x-live": "1"}).page.text for c in cookies]
    assert ["secrets" in text for text in texts] == [True, False]
    assert site.get("/topics", **{"x-live": "1"}).status == 401


def test_changes_are_made_as_the_user_of_the_session(site: Site, ann: Signer) -> None:
    cookie = in_session(site, ann)
    sent = [("do", "send"), ("body", "from a page"), ("message_id", "01")]
    assert site.post("/topics/orders", sent, cookie=cookie).status == 200
    refused = site.post("/topics/secrets", sent, cookie=cookie)
    assert (refused.status, "FORBIDDEN" in refused.page.text) == (400, True)
    assert site.send("/topics/orders", sent).headers["location"] == "/login?next=%2F"


@pytest.mark.parametrize(
    ("access_key", "secret"), [("admin", "wrong"), ("nobody", "wrong"), ("", ""), ("admin", "\xe9")]
)
def test_a_login_with_another_secret_is_refused_without_saying_which_part_was_wrong(
    site: Site, access_key: str, secret: str
) -> None:
    answer = log_in(site, access_key, secret)
    assert answer.status == 401
    assert "set-cookie" not in answer.headers
    if secret == "wrong":
        assert "UNAUTHORIZED (40100)" in answer.page.text
        assert access_key not in answer.page.text
        assert secret not in answer.page.html.replace("wrong secret", "")


def test_after_failures_an_address_waits_twice_as_long_each_time(
    broker: RunningBroker, site: Site
) -> None:
    assert log_in(site, "admin", "wrong").status == 401
    answer = log_in(site, broker.access_key, broker.secret)  # within the wait
    assert (answer.status, "the next one is possible in 1 s" in answer.page.text) == (429, True)
    until(lambda: log_in(site, broker.access_key, broker.secret).status, lambda seen: seen == 303)


def test_a_logout_ends_the_session_at_the_console(broker: RunningBroker, site: Site) -> None:
    cookie = in_session(site, Signer(broker.access_key, broker.secret))
    other = in_session(site, Signer(broker.access_key, broker.secret))
    assert cookie != other
    answer = site.send("/logout", (), cookie=cookie)
    assert (answer.status, answer.headers["location"]) == (303, "/login")
    assert site.get("/topics", cookie=cookie).status == 303
    assert site.get("/topics", cookie=other).status == 200


def test_a_login_and_a_logout_of_another_site_do_nothing(broker: RunningBroker, site: Site) -> None:
    cookie = in_session(site, Signer(broker.access_key, broker.secret))
    evil = "http://evil.example"
    assert log_in(site, broker.access_key, broker.secret, origin=evil).status == 403
    assert site.send("/logout", (), cookie=cookie, origin=evil).status == 403
    assert site.get("/logout", cookie=cookie).status == 405
    assert site.get("/topics", cookie=cookie).status == 200


def test_a_session_ends_when_its_secret_does(broker: RunningBroker, site: Site) -> None:
    signer = Signer("leaver", "secret-of-leaver-0123456789")
    entry = admin.UserEntry(resources=["topic:*"], actions=["get", "list"])
    with admin_client(broker) as client:
        request = admin.CreateUserRequest(name="leaver", secret=signer.secret, entries=[entry])
        client.call_admin(request, admin.UserReply)
        cookie = in_session(site, signer)
        assert site.get("/topics", cookie=cookie).status == 200
        client.call_admin(admin.DeleteUserRequest(name="leaver"), admin.UserReply)
    until(lambda: site.get("/topics", cookie=cookie).status, lambda status: status == 303)
    assert site.sessions.find(cookie.partition("=")[2]) is None


@pytest.mark.parametrize(("seconds", "uses"), [(IDLE_S, 1), (IDLE_S / 2, 30)])
def test_a_session_ends_by_itself(
    broker: RunningBroker, site: Site, seconds: float, uses: int
) -> None:
    """When it is not used for an hour, and after twelve hours of use."""
    clock = [0.0]
    site.sessions._now_s = lambda: clock[0]
    token = site.sessions.log_in(Signer(broker.access_key, broker.secret), "here")
    for _ in range(uses):
        clock[0] += seconds
        if site.sessions.find(token) is None:
            break
    assert site.sessions.find(token) is None
    assert clock[0] == (IDLE_S if uses == 1 else LONGEST_S)


def test_a_console_that_requires_a_login_shows_nothing_while_the_cluster_is_open() -> None:
    with RunningBroker() as broker, Site(broker.endpoint, login=True) as site:
        for path in PATHS:
            assert site.get(path).headers["location"].startswith("/login")
        answer = log_in(site, "admin", "whatever-it-is")
        assert (answer.status, "auth.mode is not on" in answer.page.text) == (400, True)


def test_the_plots_of_a_user_have_what_that_user_may_see(
    broker: RunningBroker, site: Site, ann: Signer
) -> None:
    in_session(site, ann)
    assert site.get("/").status == 303  # so the proxy refuses whoever is not logged in
    (console,) = site.sessions.watched()
    assert console.user == "ann"
    history = console.client.history

    def look() -> int:
        history.add(console.client.overview())
        return len(history.of_group("readers-of-orders"))

    until(look, lambda readings: readings == 1)
    assert history.of_group("readers-of-secrets") == history.of_topic("secrets") == []
    assert len(history.of_topic("orders")) == 1
    counted = {topic for _, _, topic in console.client.overview().counts}
    assert counted == {"orders"}
