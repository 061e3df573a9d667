"""A test's broker whose callers must be users."""

from pathlib import Path

import pytest

from popmq.cli.client import CallRefused, Client
from popmq.common.signing import Signer
from popmq.common.wire import admin_pb2 as admin
from popmq.testing import broker


@pytest.mark.parametrize("in_files", [False, True])
def test_its_own_calls_are_signed_and_others_are_refused(tmp_path: Path, in_files: bool) -> None:
    with broker(users=True, data=tmp_path if in_files else None) as b:
        b.send("orders", b"one")
        for again in (b.restart, b.crash):
            again()
            assert [m.body for m in b.receive("orders", "workers", invisible="1s")] == [b"one"]
            b.advance("1s")
        with Client(b.endpoint) as stranger, pytest.raises(CallRefused, match="40100"):
            stranger.call_admin(admin.ListTopicsRequest(), admin.ListTopicsReply)
        with Client(b.endpoint, signer=Signer(b.access_key, b.secret)) as own:
            assert [topic.name for topic in own.topics(system=False)] == ["orders"]


def test_without_users_it_has_no_access_key() -> None:
    with broker() as b:
        assert (b.access_key, b.secret) == ("", "")
