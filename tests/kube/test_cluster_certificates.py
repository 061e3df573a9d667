"""Certificates of clusters from the outside: what clients trust, when they end, who renews them."""

import asyncio
import base64
from datetime import timedelta

import pytest
from cryptography import x509
from kube.clusters import cluster, read
from kube.fake_api import Object
from kube.world import NOW, World, play, running

from popmq.operator.cluster.observed import Observed
from popmq.operator.cluster.plan import ClusterPlan
from popmq.operator.cluster.reconcile import ReconcileResult
from popmq.operator.cluster.reconcile_queue import ReconcileQueue
from popmq.operator.cluster.status import cluster_status
from popmq.operator.kube.api_client import ApiError
from popmq.operator.model.certificates import authority, serving
from popmq.operator.model.conditions import verdict_in


def secret_of(world: World, name: str) -> Object:
    secret = world.api.get("secrets", "apps", name)
    assert secret is not None
    data: Object = secret["data"]
    return data


def names_of(data: Object) -> list[str]:
    certificate = x509.load_pem_x509_certificate(base64.b64decode(data["tls.crt"]))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName)


def test_what_clients_trust_is_a_config_map_without_the_key() -> None:
    async def story(world: World) -> None:
        await running(world)
        trusted = world.api.get("configmaps", "apps", "demo-ca")
        assert trusted is not None
        ca = base64.b64decode(secret_of(world, "demo-ca")["ca.crt"]).decode()
        assert trusted["data"] == {"ca.crt": ca}
        world.change(tls={"mode": "Disabled"})
        await world.run()
        assert world.api.get("configmaps", "apps", "demo-ca") is None

    play(story)


@pytest.mark.parametrize("has_ca", [True, False])
def test_the_ca_of_a_secret_of_the_users_is_that_config_map_too(has_ca: bool) -> None:
    async def story(world: World) -> None:
        data = serving(None, authority(None, "x", NOW), ["demo-proxy"], NOW)
        if not has_ca:
            del data["ca.crt"]
        world.api.put("secrets", {"metadata": {"name": "mine", "namespace": "apps"}, "data": data})
        await running(world, cluster(tls={"mode": "Secret", "secretName": "mine"}))
        trusted = world.api.get("configmaps", "apps", "demo-ca")
        expected = base64.b64decode(data["ca.crt"]).decode() if has_ca else None
        assert (trusted or {}).get("data", {}).get("ca.crt") == expected

    play(story)


@pytest.mark.more
@pytest.mark.parametrize("state", ["paused", "invalid"])
def test_certificates_are_renewed_where_nothing_else_is_changed(state: str) -> None:
    async def story(world: World) -> None:
        await running(world)
        before, names = secret_of(world, "demo-tls"), names_of(secret_of(world, "demo-tls"))
        world.restarted.clear()
        if state == "paused":
            world.annotate("popmq.io/pause", "true")
            world.change(tls={"names": ["later.example"]}, image="popmq:2")
        else:
            world.change(config={"store.nope": "1"})
        await world.look()
        assert secret_of(world, "demo-tls") == before
        world.now += timedelta(days=61)
        await world.look()
        renewed = secret_of(world, "demo-tls")
        assert renewed["tls.crt"] != before["tls.crt"]
        assert names_of(renewed) == names
        assert world.restarted == []
        assert secret_of(world, "demo-ca")["tls.crt"], "the CA is good for ten years"
        again = world.api.get("secrets", "apps", "demo-tls")
        await world.look()
        assert world.api.get("secrets", "apps", "demo-tls") == again

    play(story)


@pytest.mark.more
def test_an_invalid_cluster_says_when_its_certificate_ends() -> None:
    async def story(world: World) -> None:
        ca = authority(None, "x", NOW)
        data = serving(None, ca, ["demo-proxy"], NOW)
        secret = {"metadata": {"name": "mine", "namespace": "apps"}, "data": data}
        world.api.put("secrets", secret)
        await running(world, cluster(tls={"mode": "Secret", "secretName": "mine"}))
        world.change(config={"store.nope": "1"})
        world.now += timedelta(days=80)
        looked = await world.look()
        assert world.condition("Ready")["reason"] == "InvalidSpec"
        assert world.condition("CertificateExpiring")["reason"] == "Expiring"
        assert looked.certificate_end == (NOW + timedelta(days=90)).timestamp()
        secret["data"] = serving(None, ca, ["demo-proxy"], world.now)
        world.api.put("secrets", secret)
        assert (await world.look()).certificate_end == (NOW + timedelta(days=170)).timestamp()
        assert world.condition("CertificateExpiring") == {}

    play(story)


@pytest.mark.more
def test_an_invalid_cluster_whose_renewal_is_refused_says_both() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.change(config={"store.nope": "1"})
        world.now += timedelta(days=80)
        world.api.fault = lambda asked: (
            "invalid" if asked.writes and asked.name == "demo-tls" else ""
        )
        with pytest.raises(ApiError):
            await world.look()
        assert world.condition("Ready")["reason"] == "InvalidSpec"
        assert world.condition("CertificateExpiring")["reason"] == "Expiring"

    play(story)


@pytest.mark.more
def test_a_protected_cluster_that_was_deleted_is_renewed_too() -> None:
    async def story(world: World) -> None:
        world.add(cluster())
        world.annotate("popmq.io/delete-protection", "true")
        await world.run()
        before = secret_of(world, "demo-tls")
        stored = world.api.get("brokerclusters", "apps", "demo")
        assert stored is not None
        stored["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
        world.api.put("brokerclusters", stored)
        world.now += timedelta(days=61)
        await world.look()
        assert secret_of(world, "demo-tls")["tls.crt"] != before["tls.crt"]

    play(story)


def test_a_ca_that_somebody_deleted_is_told_for_a_week() -> None:
    async def story(world: World) -> None:
        await running(world)
        assert world.condition("AuthorityReplaced") == {}
        world.api.remove("secrets", "apps", "demo-ca")
        await world.look()
        await world.look()
        replaced = world.condition("AuthorityReplaced")
        assert (replaced["status"], replaced["reason"]) == ("True", "Deleted")
        assert "ca.crt of ConfigMap demo-ca" in replaced["message"]
        world.now += timedelta(days=8)
        await world.look()
        assert world.condition("AuthorityReplaced") == {}

    play(story)


@pytest.mark.parametrize(
    ("left", "reason"),
    [(timedelta(days=15), ""), (timedelta(days=13), "Expiring"), (-timedelta(days=1), "Expired")],
)
def test_a_certificate_that_ends_is_told_two_weeks_before(left: timedelta, reason: str) -> None:
    data = serving(None, authority(None, "x", NOW), ["demo-proxy"], NOW)
    spec = read(cluster(tls={"mode": "Secret", "secretName": "mine"}))
    now = NOW + timedelta(days=90) - left
    status = cluster_status(spec, Observed(secrets={"mine": data}), ClusterPlan(), {}, now)
    assert verdict_in(status, "CertificateExpiring").reason == reason


def test_kubectl_scale_beside_an_autoscaler_is_told() -> None:
    given = cluster(proxies={"replicas": 5, "autoscaling": {"minReplicas": 1}})
    status = cluster_status(read(given), Observed(), ClusterPlan(), {}, NOW)
    assert not verdict_in(status, "ReplicasIgnored").status
    given["metadata"]["managedFields"] = [{"manager": "kubectl", "subresource": "scale"}]
    status = cluster_status(read(given), Observed(), ClusterPlan(), {}, NOW)
    ignored = verdict_in(status, "ReplicasIgnored")
    assert ignored.reason == "Autoscaled"
    assert "proxies.replicas = 5 was set by kubectl scale" in ignored.message


async def test_the_end_of_a_certificate_is_kept_for_metrics_until_its_cluster_goes() -> None:
    outcomes = [
        ReconcileResult(soon=True, ready=True, certificate_end=7.0),
        ReconcileResult(soon=True, ready=False),  # its spec cannot be read
        ReconcileResult(soon=False, ready=False, gone=True),
    ]
    shown: list[dict[tuple[str, str], float]] = []
    over = asyncio.Event()

    async def look(namespace: str, name: str) -> ReconcileResult:
        shown.append(dict(queue.counted.certificate_ends))
        outcome = outcomes.pop(0)
        if outcome.gone:
            loop.call_later(0, over.set)
        return outcome

    loop = asyncio.get_running_loop()
    queue = ReconcileQueue(look, resync_s=0.01, monotonic=loop.time, lost=lambda: None)
    async with asyncio.timeout(20):
        queue.enqueue("apps", "demo")
        await over.wait()
        await queue.stop()
    key = ("apps", "demo")
    assert shown == [{}, {key: 7.0}, {key: 7.0}]
    assert queue.counted.certificate_ends == {}


def test_what_a_ca_signs_waits_until_that_ca_is_stored() -> None:
    """A CA whose storing failed is made anew by the next look."""

    async def story(world: World) -> None:
        failing = {"demo-ca"}
        world.api.fault = lambda asked: (
            "conflict"
            if asked.writes and asked.plural == "secrets" and asked.name in failing
            else ""
        )
        world.add(cluster())
        with pytest.raises(ApiError):
            await world.look()
        assert world.api.get("secrets", "apps", "demo-tls") is None
        assert world.api.get("configmaps", "apps", "demo-ca") is None
        assert world.pods(), "the rest is made"
        failing.clear()
        await world.run()
        trusted = world.api.get("configmaps", "apps", "demo-ca")
        assert trusted is not None
        ca = base64.b64decode(secret_of(world, "demo-ca")["ca.crt"]).decode()
        assert trusted["data"]["ca.crt"] == ca

    play(story)
