"""Two controllers whose records are Leases of a real API server."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from controller.test_controller_process import one_master_and_then_the_next, settings
from kube.control_plane import ControlPlane

from popmq.controller import lease_store
from popmq.controller.lease_store import ApiServer, LeaseStore

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]


@pytest.fixture
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("kube"), controllers=False) as plane:
        yield plane


async def test_two_controllers_on_leases_make_one_master_and_then_the_next(
    plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pod finds it: the address in variables, the account in files."""
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text(plane.tokens["admin"])
    (account / "namespace").write_text("default")
    shutil.copy(plane.folder / "ca.crt", account)
    monkeypatch.setattr(lease_store, "SERVICE_ACCOUNT", str(account))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", plane.host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(plane.api_port))
    each = settings(tmp_path)
    # An answer of an API server takes longer than that of a file.
    times = replace(each.controller, store="kubernetes", dead_after_ms=1_000)
    token, authority = plane.tokens["admin"], str(plane.folder / "ca.crt")
    server = ApiServer(plane.url, "default", lambda: token, ca_file=authority)
    records = LeaseStore(server, each.cluster.name)
    await one_master_and_then_the_next(replace(each, controller=times), records)
    leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
    assert len(plane.items(leases)) >= 1
