"""The reports that the console links: files of one folder, as sites of their own."""

import os
import random
from pathlib import Path

import pytest
from console.console_site import Site
from console.test_console_login import in_session, make_ann
from console.test_console_measured import serving
from console.test_console_safety import hostile_texts, unexpected_markup

from popmq.common.signing import Signer
from popmq.testing.running_broker import RunningBroker

pytestmark = pytest.mark.more


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "reports"
    made.mkdir()
    for number, name in enumerate(("old", "new")):
        (made / f"{name}.html").write_text(f"<h1>{name}</h1><script>x</script>")
        os.utime(made / f"{name}.html", (1_700_000_000 + number,) * 2)
    return made


def test_the_last_reports_are_linked_and_are_sites_of_their_own(
    broker: RunningBroker, folder: Path
) -> None:
    with Site(broker.endpoint, reports=str(folder)) as site:
        assert "/reports" in site.get("/").page.links("/reports")
        page = site.get("/reports").page
        assert page.links("/reports/") == ["/reports/new.html", "/reports/old.html"]
        answer = site.get("/reports/new.html")
        assert answer.page.html == "<h1>new</h1><script>x</script>"
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("sandbox allow-scripts; default-src 'none'")
        assert "allow-same-origin" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_without_a_folder_there_is_no_link_and_the_page_names_the_setting(site: Site) -> None:
    assert site.get("/").page.links("/reports") == []
    assert "console.reports" in site.get("/reports").page.text


def test_no_path_leaves_the_folder(broker: RunningBroker, folder: Path) -> None:
    secret = folder.parent / "secret.html"
    secret.write_text("secret words")
    (folder / "link.html").symlink_to(secret)
    (folder / ".hidden.html").write_text("secret words")
    (folder / "notes.txt").write_text("secret words")
    (folder / "sub").mkdir()
    (folder / "sub" / "in.html").write_text("secret words")
    (folder / "folder.html").mkdir()
    os.mkfifo(folder / "fifo.html")
    with Site(broker.endpoint, reports=str(folder)) as site:
        assert len(site.get("/reports").page.links("/reports/")) == 2
        for name in (
            *("../secret.html", "..%2Fsecret.html", "%2e%2e/secret.html", "link.html"),
            *(".hidden.html", "notes.txt", "sub/in.html", "sub%2Fin.html", "folder.html"),
            *("fifo.html", "new.html%00", "new.html%00.html", f"{secret}", "%ff.html", "x.html"),
        ):
            answer = site.get(f"/reports/{name}")
            assert answer.status == 404, name
            assert "secret words" not in answer.page.html


def test_hostile_names_of_reports_stay_names(broker: RunningBroker, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    names = {
        text.replace("/", "")[:60].lstrip(".") + f"{number}.html"
        for number, text in enumerate(hostile_texts(200, seed))
    }
    for name in names:
        (tmp_path / name).write_text(name)
    os.close(os.open(os.fsencode(tmp_path) + b"/\xff.html", os.O_CREAT | os.O_WRONLY))
    with Site(broker.endpoint, reports=str(tmp_path)) as site:
        page = site.get("/reports").page
        assert not unexpected_markup(page)
        links = page.links("/reports/")
        assert len(links) == 50
        for target in links:
            assert site.get(target).page.html in names


def test_a_folder_that_is_not_there_is_said_in_words(broker: RunningBroker, tmp_path: Path) -> None:
    with Site(broker.endpoint, reports=str(tmp_path / "none")) as site:
        page = site.get("/reports").page
        assert f"cannot be read: {tmp_path}/none: No such file or directory" in page.text


def test_the_reports_of_a_web_server_are_linked_there(broker: RunningBroker) -> None:
    listing = (
        b'<a href="lag%20one.html">x</a><a href="../up.html">x</a><a href="/root.html">x</a>'
        b'<a href="javascript:alert(1)//.html">x</a><a href="%2e%2e%2fup.html">x</a><a>x</a>'
    )
    with serving((200, listing)) as server, Site(broker.endpoint, reports=server.url) as site:
        page = site.get("/reports").page
        assert page.links(f"{server.url}/") == [f"{server.url}/lag%20one.html"]
        assert page.links("javascript") == []
        assert site.get("/reports/lag%20one.html").status == 404
    with Site(broker.endpoint, reports=server.url) as site:
        assert f"{server.url} (console.reports): " in site.get("/reports").page.text


def test_reports_are_for_those_who_may_see_the_cluster(folder: Path) -> None:
    with RunningBroker(users=True) as broker, Site(broker.endpoint, reports=str(folder)) as site:
        ann = make_ann(broker)
        admin = in_session(site, Signer(broker.access_key, broker.secret))
        hers = in_session(site, ann)
        for path in ("/reports", "/reports/new.html"):
            assert site.get(path).status == 303
            assert "FORBIDDEN" in site.get(path, cookie=hers).page.text
            assert "new" in site.get(path, cookie=admin).page.html
