"""When proxies stop to serve administration on the public port: once nothing needs it there."""

from collections.abc import Mapping
from typing import Any

import pytest
from kube.clusters import cluster, read
from kube.fake_api import Object, copied
from kube.test_builders import made, named
from kube.test_lag_reports import report
from kube.world import NOW, World, play, running

from popmq.operator.cluster.admin_stage import AdminStage, admin_stage
from popmq.operator.model.certificates import SecretData, authority, serving
from popmq.operator.model.manifest import Manifest

ON_PUBLIC = 'admin_on_public = "true"'
OFF_PUBLIC = 'admin_on_public = "false"'
SETTING = "proxy.admin_on_public"


def of_before(*, admin_port: bool = True, settled: bool = True) -> Manifest:
    """The Deployment of proxies as an earlier operator made it."""
    deployment = named(made(cluster()), "Deployment", "demo-proxy")
    template = deployment["spec"]["template"]
    del template["metadata"]["annotations"]["popmq.io/admin-port"]
    if not admin_port:
        (container,) = template["spec"]["containers"]
        container["ports"] = [port for port in container["ports"] if port["name"] != "admin"]
    updated = 2 if settled else 1
    deployment["status"] = {"replicas": 2, "updatedReplicas": updated, "readyReplicas": 2}
    return deployment


def stage(
    deployment: Manifest | None,
    *reports: Object,
    secrets: Mapping[str, SecretData] | None = None,
    **spec: Any,
) -> AdminStage:
    return admin_stage(read(cluster(**spec)), deployment, secrets or {}, reports)


def test_a_new_cluster_never_administers_on_the_public_port() -> None:
    assert stage(None).on_public is False
    assert stage(None).verdict.reason == "AdminPortOnly"


@pytest.mark.parametrize("given", [{"admin_port": False}, {"settled": False}])
def test_a_cluster_of_before_does_until_every_proxy_has_an_admin_port(
    given: dict[str, bool],
) -> None:
    before = stage(of_before(**given))
    assert (before.on_public, before.verdict.status) == (True, "True")
    assert before.verdict.reason == "RollingOut"
    assert stage(of_before()).on_public is False


def test_a_report_whose_image_may_be_older_keeps_it() -> None:
    kept = stage(of_before(), report("weekly", image="reports:old"), report("hourly"))
    assert (kept.on_public, kept.verdict.reason) == (True, "OtherImages")
    assert "weekly" in kept.verdict.message
    assert "hourly" not in kept.verdict.message
    assert stage(of_before(), report("hourly")).on_public is False
    by_hand = {SETTING: "false"}
    assert stage(of_before(), report(image="reports:old"), config=by_hand).on_public is False


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["demo-proxy.apps.svc"], True),
        (["demo-proxy.apps.svc", "demo-admin.apps.svc"], False),
        (["*.apps.svc"], False),
    ],
)
def test_a_certificate_of_the_users_has_to_name_the_service_of_the_admin_port(
    names: list[str], kept: bool
) -> None:
    tls = {"mode": "Secret", "secretName": "mine"}
    secret = serving(None, authority(None, "x", NOW), names, NOW)
    result = stage(of_before(), secrets={"mine": secret}, tls=tls)
    assert result.on_public is kept
    assert (result.verdict.reason == "CertificateLacksName") is kept
    del secret["ca.crt"]  # clients may trust its authority anyway
    assert stage(of_before(), secrets={"mine": secret}, tls=tls).on_public is kept


def test_what_was_separated_stays_so_unless_the_settings_say_otherwise() -> None:
    separate = named(made(cluster()), "Deployment", "demo-proxy")
    assert stage(separate, report(image="reports:old")).on_public is False
    back = stage(separate, config={SETTING: "true"})
    assert (back.on_public, back.verdict.reason) == (True, "Configured")


@pytest.mark.more
def test_an_upgrade_of_the_operator_separates_in_two_rollouts_of_the_proxies_alone() -> None:
    async def story(world: World) -> None:
        await running(world)
        assert OFF_PUBLIC in settings_of(world)
        assert world.condition("AdminOnPublic")["status"] == "False"
        stored = world.api.objects["deployments", "apps", "demo-proxy"]
        older = copied(of_before(admin_port=False)["spec"]["template"])
        stored.body["spec"]["template"] = older
        world.restarted.clear()
        world.api.after = lambda: None  # Kubernetes takes its time with the pods
        for _ in range(3):
            await world.look()
            assert ON_PUBLIC in settings_of(world)
            assert world.condition("AdminOnPublic")["reason"] == "RollingOut"
            stored = world.api.objects["deployments", "apps", "demo-proxy"]
            stored.body["status"].update(updatedReplicas=1, replicas=2)
        world.api.after = world.settle
        stored.body["status"].pop("replicas")
        world.settle()
        await world.run()
        assert OFF_PUBLIC in settings_of(world)
        assert world.condition("AdminOnPublic")["reason"] == "AdminPortOnly"
        assert {name.rpartition("-pod-")[0] for name in world.restarted} == {"demo-proxy"}
        world.change(config={SETTING: "true"})
        await world.run()
        assert ON_PUBLIC in settings_of(world)

    play(story)


def settings_of(world: World) -> str:
    config = world.api.get("configmaps", "apps", "demo-config")
    assert config is not None
    text: str = config["data"]["popmq.toml"]
    return text
