"""Tasks that need a look at many things at once: by key, by reason, by who holds what."""

from collections.abc import Iterator
from urllib.parse import quote

import pytest
from console.console_site import Site, until

from popmq.cli.client import Client
from popmq.common.quantities import iso_time
from popmq.common.wire import admin_pb2 as admin
from popmq.console.page import now_ms
from popmq.testing.running_broker import RunningBroker

pytestmark = pytest.mark.more


@pytest.fixture
def client(broker: RunningBroker) -> Iterator[Client]:
    with Client(broker.endpoint, "worker-7@1@2@<three>") as opened:
        yield opened


def test_timers_are_found_by_key_and_cancelled_together(broker: RunningBroker, site: Site) -> None:
    broker.create_topic("later", type="delay")
    gone = [broker.send("later", b"gone", keys=["k", "x"], delay=f"{n}h") for n in (20, 30)]
    kept = [
        broker.send("later", b"kept", keys=["kk"], delay="25h"),
        broker.send("later", b"kept", keys=["k"], delay="80h"),
    ]
    end = iso_time(now_ms() + 48 * 3_600_000)
    page = until(
        lambda: site.get(f"/timers?key=k&topic=later&to={quote(end)}").page,
        lambda page: "2 that match" in page.text,
    )
    assert sorted(page.links("/messages/")) == sorted(f"/messages/{each}" for each in gone)
    form = next(form for form in page.forms if dict(form.fields).get("select"))
    asked = site.post(form.action, form.fields)
    assert "Cancel 2 timers?" in asked.page.text
    assert "2 of 2 cancelled" in site.submit(asked.page.form(sure="yes")).page.text
    left = site.get("/timers?topic=later").page.links("/messages/")
    assert sorted(left) == sorted(f"/messages/{each}" for each in kept)


def test_dead_letters_of_one_reason_are_shown_and_redriven(
    broker: RunningBroker, site: Site
) -> None:
    broker.create_group("failing", max_attempts=1)
    late = broker.send("bills", b"late")
    assert broker.receive("bills", "failing", invisible="10s")
    broker.advance("11s")
    path = "/dead-letters?group=failing"
    until(lambda: site.get(path).page.text, lambda text: "1 dead letters" in text)
    assert site.get(f"{path}&reason=rejected").page.links("/messages/") == []
    assert site.get(f"{path}&reason=max+attempts").page.links("/messages/") == [f"/messages/{late}"]
    fields = [("do", "all"), ("rate", "10")]
    none = site.post(path, [*fields, ("reason", "rejected")])
    assert "Nothing to redrive" in none.page.text
    asked = site.post(path, [*fields, ("reason", "max attempts")])
    assert "Redrive 1 dead letters of failing?" in asked.page.text
    site.submit(asked.page.form(sure="yes", reason="max attempts"))
    until(lambda: site.get(path).page.text, lambda text: "done" in text)
    (back,) = broker.receive("bills", "failing", wait="5s")
    assert back.message_id == late


def test_a_group_shows_which_client_holds_messages_of_which_queue(
    broker: RunningBroker, site: Site, client: Client
) -> None:
    broker.create_topic("held", queues=1)
    for number in range(3):
        broker.send("held", b"%d" % number)
    first, *_ = broker.receive("held", "holders", invisible="1h")
    broker.ack(first)
    page = site.get("/groups/holders").page
    holder = site.client.group("holders").queues[0].holders
    assert [count for _, count in holder] == [2]
    assert f"{holder[0][0]}: 2" in page.text.replace(" : ", ": ")
    request = admin.TimeSpansRequest(group="holders", topics=["held"])
    (span,) = client.call_admin(request, admin.TimeSpansReply).spans
    assert not span.holders  # only who asks for it pays for it
