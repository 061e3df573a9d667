"""Every tool of popmq's own against a cluster whose callers must be users (auth.mode is on)."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e.processes import Role, role_environment
from e2e.test_users import Commands
from kube.clusters import SMALL, read
from programs import run_program

from popmq.common.errors import PopmqError
from popmq.common.signing import ACCESS_KEY_VARIABLE, SECRET_VARIABLE, Signer
from popmq.common.wire import admin_pb2 as admin
from popmq.operator.kube.admin_client import AdminClient, DataPlaneUnavailable
from popmq.reports.records.endpoint import ReportEndpoint

pytestmark = pytest.mark.more

UNKNOWN, FORBIDDEN = "40100", "40300"
NOBODY = Signer()


@dataclass
class Users:
    endpoint: str
    admin: Signer
    folder: Path

    def commands(self, signer: Signer) -> Commands:
        return Commands(self.endpoint, signer.access_key, signer.secret)

    def user(self, name: str, *grants: tuple[str, ...]) -> Signer:
        own = self.commands(self.admin)
        made = json.loads(own.ok("user", "create", name, "-o", "json"))
        for grant in grants:
            own.ok("user", "grant", name, *grant)
        return Signer(made["access_key"], made["secret"])


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    folder = tmp_path_factory.mktemp("tools")
    flags = ["--auth", "--data", str(folder / "data"), "--port", "0", "--http-port", "0"]
    with Role("up", ["up", *flags], folder=folder, settings={}) as role:
        first = json.loads((folder / "data" / "admin.json").read_text())
        yield Users(role.ready.endpoint, Signer(**first), folder)


@pytest.fixture(scope="module")
def powerless(users: Users) -> Signer:
    """A user without a policy."""
    return users.user("powerless")


REPORTER = (("--cluster", "--allow", "get"), ("--topic", "*", "--allow", "sub"))


def test_the_load_of_bench_is_signed(users: Users, powerless: Signer) -> None:
    rights = ("--allow", "create,delete,update,get,pub,sub")
    bench = users.user(
        "bench", ("--topic", "popmq-bench-*", *rights), ("--group", "popmq-bench-*", *rights)
    )
    arguments = ("bench", "--for", "1s", "--connections", "2", "--rate", "50", "-o", "json")
    (figures,) = json.loads(users.commands(bench).ok(*arguments))
    assert figures["send"]["done"] > 0
    assert figures["ack"]["done"] > 0
    for signer, code in ((NOBODY, UNKNOWN), (powerless, FORBIDDEN)):
        refused = users.commands(signer).run(*arguments)
        assert (refused.returncode, code in refused.stderr) == (1, True), refused.stderr


def test_a_reader_of_reports_signs_with_the_user_of_its_environment(
    users: Users, powerless: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    users.commands(users.admin).ok("topic", "create", "read")
    users.commands(users.admin).ok("send", "read", "x")
    reporter = users.user("reader", *REPORTER)

    def describe(signer: Signer) -> int:
        monkeypatch.setenv(ACCESS_KEY_VARIABLE, signer.access_key)
        monkeypatch.setenv(SECRET_VARIABLE, signer.secret)
        with ReportEndpoint(users.endpoint, patience_s=0) as endpoint:
            (broker,), _ = endpoint.describe(["messages"], topics=["read"])
            pieces = [
                piece
                for partition in broker.partitions
                for piece in endpoint.read(broker.broker, partition)
            ]
            return sum(piece.next - piece.first for piece in pieces)

    assert describe(reporter) >= 1
    _refuses(describe, powerless)


def test_the_operators_calls_are_signed(users: Users, powerless: Signer) -> None:
    spec = read(SMALL)

    def topics(signer: Signer) -> int:
        with AdminClient(spec, users.endpoint, None, signer) as port:
            reply = port.ask("ListTopics", admin.ListTopicsRequest(), admin.ListTopicsReply)
            return len(reply.topics)

    assert topics(users.admin) >= 0
    _refuses(topics, powerless)


def _refuses(call: Callable[[Signer], object], powerless: Signer) -> None:
    for signer, code in ((NOBODY, UNKNOWN), (powerless, FORBIDDEN)):
        with pytest.raises((PopmqError, DataPlaneUnavailable), match=code):
            call(signer)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_report_of_spark_is_made_with_the_user_of_a_context(
    users: Users, powerless: Signer
) -> None:
    reporter = users.user("reporter", *REPORTER)

    def report(signer: Signer, name: str) -> tuple[int, str]:
        secret = users.folder / f"{name}.json"
        secret.write_text(json.dumps({"access_key": signer.access_key, "secret": signer.secret}))
        known = {"XDG_CONFIG_HOME": str(users.folder / name)}
        user = ["--access-key", signer.access_key, "--secret-file", str(secret)]
        add = ["context", "add", "here", "--endpoint", users.endpoint]
        _popmq(known, *add, *(user if signer.access_key else []))
        return _popmq(known, "report", "lag", "--patience", "1s", "--json")

    status, output = report(reporter, "reporter")
    assert (status, reporter.secret in output) == (0, False), output
    for signer, name, code in ((NOBODY, "nobody", UNKNOWN), (powerless, "powerless", FORBIDDEN)):
        status, output = report(signer, name)
        assert (status, code in output) == (1, True), output


def _popmq(variables: dict[str, str], *arguments: str) -> tuple[int, str]:
    done = run_program(
        [sys.executable, "-m", "popmq.cli", *arguments],
        env=role_environment(variables),
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr
