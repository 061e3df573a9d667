"""The first answer of each page holds its data, without a WebSocket and without JavaScript."""

import pytest
from console.console_site import Parsed, Site, until

from popmq.cli.client import Client
from popmq.testing.running_broker import RunningBroker


@pytest.fixture(scope="module", autouse=True)
def traffic(broker: RunningBroker) -> dict[str, str]:
    """A group that acked one message, holds another, and left the rest; timers; a dead letter."""
    broker.create_topic("orders", type="mixed")
    broker.create_group("failing", max_attempts=1)
    ids = {
        f"order-{n}": broker.send("orders", f'{{"n": {n}}}', keys=[f"order-{n}"]) for n in range(5)
    }
    (first,) = broker.receive("orders", "billing", limit=1)
    broker.ack(first)
    (held,) = broker.receive("orders", "billing", limit=1, invisible="1h")
    ids["acked"], ids["held"] = first.message_id, held.message_id
    ids["dead"] = broker.send("letters", b"no use", tag="us", keys=["k-1"])
    broker.receive("letters", "failing", invisible="10s")
    ids["timer"] = broker.send("orders", b"later", delay="2h")
    broker.advance("61s")
    return ids


def test_the_overview_gives_a_verdict_with_its_reasons(site: Site) -> None:
    page = site.get("/").page
    assert "Healthy, but have a look" in page.text
    assert "group billing: the oldest waiting message of orders has waited for 1m" in page.text
    assert "group failing has 1 dead letters" in page.text
    assert "/groups/billing" in page.links("/groups/")
    assert "1 of 1" in page.text


def test_the_list_of_groups_has_the_worst_first_and_filters_by_name(site: Site) -> None:
    assert site.get("/groups").page.links("/groups/") == ["/groups/billing", "/groups/failing"]
    assert site.get("/groups?q=FAIL").page.links("/groups/") == ["/groups/failing"]
    assert "There is no such group" in site.get("/groups?q=nothing").page.text


def test_a_group_says_how_far_it_is_and_what_holds_it_up(site: Site) -> None:
    page = site.get("/groups/billing").page
    assert "Behind: the oldest ready message waits, while members hold 1 others." in page.text or (
        "Stopped: no member is connected, and 3 messages are ready." in page.text
    )
    assert page.links("/topics/").count("/topics/orders") >= 9  # its topic, and its eight queues


def test_a_topic_shows_its_readers_queues_and_latest_messages(
    site: Site, traffic: dict[str, str]
) -> None:
    page = site.get("/topics/orders").page
    assert f"/messages/{traffic['order-4']}" in page.links("/messages/")
    assert '{"n": 4}' in page.text
    assert "/groups/billing" in page.links("/groups/")
    assert len([link for link in page.links("/topics/orders?") if "queue=" in link]) == 8


def test_messages_are_found_by_key_and_by_queue_and_offset(
    site: Site, traffic: dict[str, str]
) -> None:
    by_key = site.get("/topics/orders?key=order-3").page
    assert by_key.links("/messages/") == [f"/messages/{traffic['order-3']}"]
    shown = {
        link
        for queue in range(8)
        for link in site.get(f"/topics/orders?queue={queue}%40broker-a").page.links("/messages/")
    }
    assert shown == {f"/messages/{traffic[f'order-{n}']}" for n in range(5)}


def test_a_message_is_explained_as_a_timeline_with_what_comes_next(
    site: Site, traffic: dict[str, str]
) -> None:
    page = site.get(f"/messages/{traffic['acked']}").page
    assert "ACKED" in page.text
    stored, delivered, acked = (
        page.text.index(word) for word in ("stored at", "delivered at", "acked at")
    )
    assert stored < delivered < acked
    held = site.get(f"/messages?id={traffic['held']}").page
    assert "INVISIBLE" in held.text
    assert "Next:" in held.text


def test_timers_are_counted_by_due_time_and_listed(site: Site, traffic: dict[str, str]) -> None:
    page = site.get("/timers").page
    assert f"/messages/{traffic['timer']}" in page.links("/messages/")
    assert "Due within" in page.text
    assert "No message waits for its delivery time." in site.get("/timers?to=2001-01-01").page.text


def test_dead_letters_are_listed_by_group_and_filtered_by_reason(
    site: Site, traffic: dict[str, str]
) -> None:
    assert "/dead-letters?group=failing" in site.get("/dead-letters").page.links("/dead-letters?")
    page = site.get("/dead-letters?group=failing").page
    assert f"/messages/{traffic['dead']}" in page.links("/messages/")
    assert "max attempts" in page.text
    none = site.get("/dead-letters?group=failing&reason=poison").page
    assert "There is no such dead letter." in none.text


def test_a_client_is_listed_with_what_it_reads(broker: RunningBroker, site: Site) -> None:
    with Client(broker.endpoint, "host@1@2@<three>") as client:

        def page() -> Parsed:
            client.heartbeat("billing")
            return site.get("/clients?q=%3CTHREE%3E").page

        shown = until(page, lambda page: "host@1@2@<three>" in page.text)
        assert "/groups/billing" in shown.links("/groups/")
        assert "PYTHON" in shown.text


def test_the_cluster_and_settings_pages_show_what_runs(site: Site) -> None:
    assert "Broker group broker-a" in site.get("/cluster").page.text
    settings = site.get("/settings?q=max_attempts").page
    assert "group.max_attempts" in settings.text


def test_what_does_not_exist_is_a_page_that_names_it(site: Site) -> None:
    for path, words in (
        ("/groups/nobody", "nobody"),
        ("/topics/nothing", "nothing"),
        ("/messages/0123", "no message 0123 in any topic"),
        ("/nowhere", "There is no such page"),
    ):
        answer = site.get(path)
        assert (answer.status, words in answer.page.text) == (404, True), path


def test_lists_are_paged_by_the_server(broker: RunningBroker, site: Site) -> None:
    for number in range(60):
        broker.create_topic(f"many-{number:02}", queues=1)
    # What was answered a moment ago may be shown again.
    first = until(
        lambda: site.get("/topics?q=many").page, lambda page: "1 to 50 of 60" in page.text
    )
    assert len(first.links("/topics/many")) == 50
    (behind,) = (link for link in first.links("/topics?") if "first=50" in link)
    second = site.get(behind).page
    assert len(second.links("/topics/many")) == 10
    assert "Before" in second.text


def test_plots_of_rates_lag_and_ages_are_on_the_pages_where_people_look(
    broker: RunningBroker, site: Site
) -> None:
    client = site.client
    client.history.add(client.overview())
    broker.send("orders", b"one more")
    broker.receive("orders", "billing", limit=1)

    def with_a_reading() -> int:
        client.history.add(client.overview())
        return len(client.history.of_group("billing"))

    until(with_a_reading, lambda readings: readings >= 3)
    for path in ("/", "/groups/billing", "/topics/orders"):
        page = site.get(path).page
        assert page.tags.count("svg") == 3, path
        assert "Messages a second, last" in page.text
        assert "Oldest ready message, last" in page.text
    assert any(reading.stored > 0 for reading in client.history.of_topic("orders"))
    assert any(reading.delivered > 0 for reading in client.history.of_group("billing"))
