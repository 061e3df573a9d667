"""Changes state how many things they touch, ask, and do what they asked for, once."""

import socket

import pytest
from console.console_site import Site, until

from popmq.common.errors import PopmqError
from popmq.testing.running_broker import RunningBroker


def test_a_message_that_is_sent_from_a_page_is_received_once(
    broker: RunningBroker, site: Site
) -> None:
    broker.create_topic("sent")
    form = site.get("/topics/sent").page.form(do="send")
    answer = site.submit(form, body="hello <b>", key="k-1", tag="eu")
    assert "Sent message" in answer.page.text
    site.submit(form, body="hello <b>", key="k-1", tag="eu")  # a second press of the button
    received = broker.receive("sent", "readers")
    assert [(item.body, item.tag, item.keys) for item in received] == [
        (b"hello <b>", "eu", ("k-1",))
    ]


def test_pages_that_share_an_answer_send_two_messages(broker: RunningBroker, site: Site) -> None:
    broker.create_topic("shared")
    forms = [site.get("/topics/shared", **{"x-live": "1"}).page.form(do="send") for _ in range(2)]
    for form in forms:
        site.submit(form, body="the same words")
    assert len(broker.receive("shared", "readers")) == 2


def test_a_topic_is_created_and_is_deleted_only_with_its_name_typed(
    broker: RunningBroker, site: Site
) -> None:
    create = site.get("/topics").page.form(do="create")
    assert "Topic made" in site.submit(create, name="made", type="fifo", queues="3").page.text
    broker.send("other", b"x")
    delete = site.get("/topics/made").page.form(do="delete")
    wrong = site.submit(delete, typed="mad")
    assert (wrong.status, "nothing was deleted" in wrong.page.text) == (400, True)
    asked = site.submit(delete, typed="made")
    assert "0 messages in 3 queues" in asked.page.text
    assert site.get("/topics/made").status == 200  # it only asked
    site.submit(asked.page.form(sure="yes"))
    assert site.get("/topics/made").status == 404


def test_a_reset_shows_what_would_move_before_it_moves_it(
    broker: RunningBroker, site: Site
) -> None:
    broker.create_topic("read", queues=1)
    broker.send("read", b"one")
    broker.ack(*broker.receive("read", "again"))
    form = site.get("/groups/again").page.form(do="reset")
    asked = site.submit(form, topic="read", to="oldest")
    assert "queues move" in asked.page.text
    assert broker.receive("read", "again") == []
    site.submit(asked.page.form(sure="yes"))
    assert [item.body for item in broker.receive("read", "again")] == [b"one"]


def test_selected_timers_are_cancelled_or_moved_after_the_question(
    broker: RunningBroker, site: Site
) -> None:
    broker.create_topic("later", type="delay")
    gone, moved = (broker.send("later", body, delay="2h") for body in (b"gone", b"moved"))
    asked = site.post("/timers", [("do", "cancel"), ("select", f"later {gone}"), ("delay", "1h")])
    assert "Cancel 1 timer?" in asked.page.text
    site.submit(asked.page.form(sure="yes"))
    asked = site.post(
        "/timers", [("do", "reschedule"), ("select", f"later {moved}"), ("delay", "5s")]
    )
    assert "1 of 1 rescheduled" in site.submit(asked.page.form(sure="yes")).page.text
    broker.advance("6s")
    received = broker.receive("later", "readers", wait="5s")
    assert [item.body for item in received] == [b"moved"]
    broker.ack(*received)
    broker.advance("3h")
    assert broker.receive("later", "readers") == []


def dead_letters(broker: RunningBroker, group: str, *bodies: bytes) -> None:
    broker.create_group(group, max_attempts=1)
    for body in bodies:
        broker.send(f"of-{group}", body)
    assert len(broker.receive(f"of-{group}", group, invisible="10s")) == len(bodies)
    broker.advance("11s")


def test_dead_letters_are_counted_first_and_redriven_after_the_question(
    broker: RunningBroker, site: Site
) -> None:
    dead_letters(broker, "gave-up", b"a", b"b", b"c")
    form = site.get("/dead-letters?group=gave-up").page.form(rate="100")
    asked = site.submit(form, do="all")
    assert "Redrive 3 dead letters of gave-up?" in asked.page.text
    assert broker.receive("of-gave-up", "gave-up") == []  # it only counted
    site.submit(asked.page.form(sure="yes"))
    bodies: set[bytes] = set()
    for _ in range(3):
        bodies |= {i.body for i in broker.receive("of-gave-up", "gave-up", wait="10s")}
        if len(bodies) == 3:
            break
    assert bodies == {b"a", b"b", b"c"}
    again = site.submit(form, do="all")
    assert "Nothing to redrive" in again.page.text


def test_only_the_selected_dead_letters_are_redriven(broker: RunningBroker, site: Site) -> None:
    dead_letters(broker, "some", b"x", b"y")
    listed = site.get("/dead-letters?group=some").page
    places = [
        v for tag, name, v in listed.attributes if (tag, name) == ("input", "value") and "@" in v
    ]
    form = listed.form(rate="100")
    nothing = site.submit(form, do="selected")
    assert "no dead letter is selected" in nothing.page.text
    asked = site.submit(form, do="selected", select=places[0])
    assert "Redrive 1 dead letters of some?" in asked.page.text
    site.submit(asked.page.form(sure="yes"))
    assert len(broker.receive("of-some", "some", wait="10s")) == 1
    assert broker.receive("of-some", "some") == []


def test_a_topic_is_altered_after_the_question(broker: RunningBroker, site: Site) -> None:
    broker.create_topic("altered", queues=2)
    form = site.get("/topics/altered").page.form(do="alter")
    assert "Nothing to alter" in site.submit(form, permission="rw").page.text
    asked = site.submit(form, permission="r", queues="3", retention="2h")
    assert "permission: rw becomes r queues: 2 becomes 3 retention:" in asked.page.text
    site.submit(asked.page.form(sure="yes"))
    assert "The permission is r." in site.get("/topics/altered").page.text
    with pytest.raises(PopmqError):
        broker.send("altered", b"x")
    fewer = site.submit(asked.page.form(sure="yes"), queues="1")
    assert (fewer.status, "cannot shrink" in fewer.page.text) == (400, True)


def test_a_parked_message_group_is_shown_and_unparked_after_the_question() -> None:
    settings = {"pop.fifo_open_offsets": 4, "pop.fifo_park_after_ms": 1}
    with RunningBroker(settings=settings) as broker, Site(broker.endpoint) as site:
        broker.create_topic("ordered", type="fifo", queues=1)
        broker.create_group("steps", type="fifo")

        def send(body: str) -> None:
            message_id = site.client.new_message_id()
            site.client.send(
                "ordered", body.encode(), message_id=message_id, message_group=body[:1]
            )

        send("a1")
        assert [item.body for item in broker.receive("ordered", "steps")] == [b"a1"]
        broker.advance("1s")
        for body in ("a2", "a3", "a4", "b1"):
            send(body)
        assert [item.body for item in broker.receive("ordered", "steps", wait="5s")] == [b"b1"]
        page = site.get("/groups/steps").page
        assert "1 message groups are parked" in page.text
        asked = site.submit(page.form(do="unpark"), action="dead-letter")
        assert "Make them dead letters: 3 messages" in asked.page.text
        assert "It was about 3 messages." in site.submit(asked.page.form(sure="yes")).page.text
        until(lambda: site.client.dead_letter_groups(), lambda dead: dead == {"steps": 3})
        letters, _, _ = site.client.dead_letters("steps")
        assert [letter.message.body for letter in letters] == [b"a2", b"a3", b"a4"]


def test_a_place_that_names_no_dead_letter_is_refused(broker: RunningBroker, site: Site) -> None:
    broker.create_group("no-place")
    for place in ("x", "9" * 30 + "@broker-a", "5@", "-1@broker-a"):
        answer = site.post(
            "/dead-letters?group=no-place",
            [("do", "selected"), ("select", place), ("rate", "1"), ("sure", "")],
        )
        assert (answer.status, "names no dead letter" in answer.page.text) == (400, True), place


def test_a_drain_asks_and_can_be_ended(broker: RunningBroker, site: Site) -> None:
    drain = site.get("/cluster").page.form(do="drain")
    asked = site.submit(drain)
    assert "takes no new messages from now on" in asked.page.text
    assert "it takes no new messages" not in site.get("/cluster").page.text


def test_a_refusal_is_shown_in_the_words_of_the_broker(site: Site) -> None:
    create = site.get("/topics").page.form(do="create")
    for changed, words in (
        ({"name": "bad name!"}, "bad name!"),
        ({"name": "fine", "queues": "many"}, "Queues is 'many': write a number from 1 to 1024"),
    ):
        answer = site.submit(create, **{"type": "normal", "queues": "1", **changed})
        assert (answer.status, words in answer.page.text) == (400, True)


def test_no_answer_of_the_proxy_is_a_page_that_tries_again() -> None:
    with Site("127.0.0.1:9") as alone:
        for path in ("/", "/groups", "/topics/orders", "/timers", "/cluster"):
            answer = alone.get(path)
            assert answer.status == 503, path
            assert "This page tries again by itself." in answer.page.text
        with pytest.raises(PopmqError, match=r"127\.0\.0\.1:9"):
            alone.client.brokers()


def test_a_change_without_an_answer_is_not_called_undone_and_only_a_message_is_sent_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
    with Site(endpoint) as site:  # nobody listens there
        form = [("do", "send"), ("body", "x <b>"), ("message_id", "01")]
        answer = site.post("/topics/orders", form)
        assert (answer.status, "Nothing was changed" in answer.page.text) == (503, False)
        assert "Whether it was done is not known." in answer.page.text
        again = answer.page.form(message_id="01")
        assert (again.action, set(form) <= set(again.fields)) == ("/topics/orders", True)
        reset = [("do", "reset"), ("topic", "orders"), ("to", "oldest"), ("sure", "yes")]
        answer = site.post("/groups/g", reset)
        assert answer.page.links("/groups/g") == ["/groups/g"]
        assert all("sure" not in dict(form.fields) for form in answer.page.forms)
