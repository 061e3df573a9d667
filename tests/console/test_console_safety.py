"""Other sites change nothing, other machines reach nothing, and no text becomes markup."""

import random
from urllib.parse import quote

import pytest
from console.console_site import Parsed, Site

from popmq.common.errors import ConfigError
from popmq.console.web.command import listen
from popmq.testing.running_broker import RunningBroker

SEND = [("do", "send"), ("body", "x"), ("message_id", "01")]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "ftp://{host}"},
        {"host": "evil.example", "origin": "http://evil.example"},
    ],
)
def test_a_form_of_another_site_changes_nothing(
    headers: dict[str, str], broker: RunningBroker, site: Site
) -> None:
    broker.send("safe", b"a first message")
    broker.ack(*broker.receive("safe", "readers"))
    given = {name: value.format(host=site.host) for name, value in headers.items()}
    answer = site.post("/topics/safe", SEND, **given)
    assert answer.status == 403
    assert broker.receive("safe", "readers") == []


def test_a_name_that_points_to_this_machine_reads_no_page(site: Site) -> None:
    assert site.get("/", host="evil.example").status == 403
    assert site.get("/", host="evil.example:80").status == 403
    assert site.get("/", host=f"localhost:{site.host.split(':')[1]}").status == 200


def test_every_answer_forbids_scripts_that_are_not_files_of_the_console(site: Site) -> None:
    for path in ("/", "/nowhere", "/static/live.js", "/topics/none"):
        policy = site.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
    assert site.get("/", host="evil.example").headers["x-content-type-options"] == "nosniff"


def test_there_is_no_web_socket(site: Site) -> None:
    answer = site.get(
        "/", upgrade="websocket", connection="Upgrade", **{"sec-websocket-key": "AAAA"}
    )
    assert answer.status == 200  # an ordinary page: the upgrade is ignored


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.168.1.1:0", "example.com:0"])
def test_an_address_that_other_machines_reach_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="--open-to-anybody"):
        listen(address)


def test_a_console_that_is_open_to_anybody_still_refuses_forms_of_other_sites(
    broker: RunningBroker,
) -> None:
    with Site(broker.endpoint, any_host=True) as site:
        assert site.get("/", host="console.example").status == 200
        path, host = "/topics/open", "console.example"
        assert site.post(path, SEND, host=host, origin="http://evil.example").status == 403
        assert site.post(path, SEND, host=host, origin="https://console.example").status == 200
    assert len(broker.receive("open", "readers")) == 1


def test_a_form_that_is_too_large_is_refused(site: Site) -> None:
    answer = site.post("/topics/safe", [("body", "x" * (9 << 20))])
    assert answer.status == 400
    assert "8388608 bytes" in answer.page.text


PIECES = (
    *("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</textarea><script>"),
    *("'><svg onload=alert(1)>", "javascript:alert(1)", "{{7*7}}", "${7*7}", "%3Cscript%3E"),
    *("&lt;b&gt;", "]]>", "<!--", "--></main>", "</title><h1>", "\u202egnp.exe", "\u2028x"),
    *(
        "../../..",
        "?a=b#c",
        "a/b",
        "\\",
        "`",
        "é" * 40,
        "x" * 500,
        "<a href=//evil>",
        "&#x3C;i&#x3E;",
    ),
)


def hostile_texts(count: int, seed: int) -> list[str]:
    numbers = random.Random(seed)
    return [
        "".join(numbers.choice(PIECES) for _ in range(numbers.randint(1, 3))) + str(number)
        for number in range(count)
    ]


def unexpected_markup(page: Parsed) -> list[object]:
    """Tags and attributes that the console itself never writes."""
    scripts = page.tags.count("script")
    bad_tags = {"img", "iframe", "object", "embed", "style", "base", "i", "b"} & set(page.tags)
    bad_attributes = [
        each
        for each in page.attributes
        if each[1].startswith("on")
        or each[1] == "style"
        or (each[1] in ("href", "src", "action") and not each[2].startswith(("/", "#", "?")))
    ]
    return [*bad_tags, *bad_attributes, *(["script"] if scripts != 1 else [])]


def test_two_hundred_hostile_names_and_bodies_stay_texts(broker: RunningBroker, site: Site) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    broker.create_topic("hostile", queues=4)
    ids = {}
    for words in hostile_texts(200, seed):
        key = words.replace(" ", "")[:120]
        ids[broker.send("hostile", words, keys=[key], properties={"note": words})] = words
    seen = ""
    for queue in range(4):
        page = site.get(f"/topics/hostile?queue={queue}%40broker-a").page
        assert not unexpected_markup(page)
        seen += page.html
    assert "&lt;script&gt;alert(1)" in seen
    for number, message_id in enumerate(ids):
        if number % 10 == 0:
            page = site.get(f"/messages/{message_id}").page
            assert not unexpected_markup(page), ids[message_id]
    for number, words in enumerate(ids.values()):
        if number % 4 == 0:
            path = ("/groups", "/topics", "/clients", "/settings")[number // 4 % 4]
            assert not unexpected_markup(site.get(f"{path}?q={quote(words)}").page), words
            page = site.get(f"{path}/{quote(words, safe='')}").page
            assert not unexpected_markup(page), words
            for path in (
                *("/timers?topic=hostile&key=", "/dead-letters?group=g&reason=", "/?hours="),
                *("/topics/hostile?hours=", "/reports/"),
            ):
                page = site.get(f"{path}{quote(words, safe='')}").page
                assert not unexpected_markup(page), (path, words)
