"""TLS between the processes of a cluster: a new one has it at once, others in two rolls."""

import base64
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from kube.clusters import cluster, read
from kube.test_cluster_secret import Silent
from kube.world import World, play, running

from popmq.common.protocol.cluster_secret import ClusterSecret
from popmq.common.protocol.frame_server import FrameServer
from popmq.common.protocol.frame_tls import FrameTls
from popmq.common.protocol.frames import FrameSettings, Hello, ProcessRole
from popmq.common.signing import Signer
from popmq.operator.cluster.cluster_secrets import plane_access
from popmq.operator.cluster.data_plane import NetworkDataPlane
from popmq.operator.cluster.secret_stage import SecretStage, StoredSecret
from popmq.operator.model.certificates import SecretData, authority, between_processes
from popmq.operator.model.spec import SpecError
from popmq.operator.model.stages import PeerRequirement

NAME = "demo-process-tls"
USE = "popmq.io/process-tls"
WISHED = {"mode": "Own", "betweenProcesses": True}
NOT_WISHED = {"mode": "Own", "betweenProcesses": False}
NOW = datetime.now(UTC)
OURS = ClusterSecret((b"k" * 64,))


def uses(world: World) -> set[str]:
    """Of pods of every role."""
    return {
        pod["metadata"]["annotations"].get(USE, "none") for pod in world.api.all("pods", "apps")
    }


def settings_of(world: World) -> str:
    config = world.api.get("configmaps", "apps", "demo-config")
    assert config is not None
    return str(config["data"]["popmq.toml"])


async def seen_uses(world: World) -> list[set[str]]:
    """Until nothing is left to do."""
    seen = []
    for _ in range(80):
        outcome = await world.look()
        seen.append(uses(world))
        if not outcome.soon:
            break
    return seen


def certificate_in(data: SecretData) -> x509.Certificate:
    return x509.load_pem_x509_certificate(base64.b64decode(data["tls.crt"]))


def test_a_new_cluster_requires_tls_at_once() -> None:
    async def story(world: World) -> None:
        world.add(cluster(tls=WISHED))
        await world.look()
        assert uses(world) == {"required"}
        await world.run()
        verdict = world.condition("ProcessTls")
        assert (verdict["status"], verdict["reason"]) == ("True", "Required")
        assert 'tls_certificate = "/etc/popmq-process-tls/tls.crt"' in settings_of(world)
        assert 'tls_authority = "/etc/popmq-process-tls/ca.crt"' in settings_of(world)
        assert "tls_required" not in settings_of(world)
        for pod in world.api.all("pods", "apps"):
            (volume,) = (item for item in pod["spec"]["volumes"] if item["name"] == "process-tls")
            assert volume["secret"]["secretName"] == NAME
            assert [item["path"] for item in volume["secret"]["items"]] == [
                *("tls.crt", "tls.key", "ca.crt")
            ]

    play(story)


def test_a_cluster_that_wishes_none_has_neither_certificate_nor_condition() -> None:
    async def story(world: World) -> None:
        await running(world)
        assert uses(world) == {"none"}
        assert world.api.get("secrets", "apps", NAME) is None
        assert "cluster.tls" not in settings_of(world)
        assert "ProcessTls" not in {
            condition["type"]
            for condition in world.api.all("brokerclusters", "apps")[0]["status"]["conditions"]
        }

    play(story)


def test_a_cluster_gets_tls_in_two_rolls_and_loses_it_in_two() -> None:
    """No pod that requires it may run beside one that has none."""

    async def story(world: World) -> None:
        await running(world)
        for tls, last in ((WISHED, "required"), (NOT_WISHED, "none")):
            world.restarted.clear()
            world.change(tls=tls)
            seen = await seen_uses(world)
            assert {"accepted"} in seen, seen
            assert not any({"none", "required"} <= pair for pair in seen), seen
            assert uses(world) == {last}
            brokers = [name for name in world.restarted if "broker" in name]
            assert sorted(brokers) == sorted(world.pods() * 2)
            assert world.down["demo-broker-0"] <= 1

    play(story)


@pytest.mark.more
def test_the_second_roll_waits_for_the_last_pod_without_a_certificate() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.unready.add("demo-broker-0-2")
        world.change(tls=WISHED)
        world.settle()
        for _ in range(20):
            await world.look()
        assert "required" not in uses(world)
        verdict = world.condition("ProcessTls")
        assert (verdict["status"], verdict["reason"]) == ("False", "RollingOut")
        assert "demo-broker-0-" in verdict["message"]
        world.unready.clear()
        world.settle()
        await world.run()
        assert uses(world) == {"required"}

    play(story)


@pytest.mark.more
def test_a_wish_that_is_taken_back_halfway_ends_without_a_pair_that_cannot_talk() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.change(tls=WISHED)
        for _ in range(80):
            await world.look()
            if "required" in uses(world):
                break
        world.change(tls=NOT_WISHED)
        seen = await seen_uses(world)
        assert not any({"none", "required"} <= pair for pair in seen), seen
        assert uses(world) == {"none"}

    play(story)


def test_it_needs_the_clusters_own_ca() -> None:
    for mode in ("Disabled", "Secret"):
        tls = {"mode": mode, "secretName": "mine", "betweenProcesses": True}
        with pytest.raises(SpecError, match=r"needs tls\.mode = Own"):
            read(cluster(tls=tls))


def test_the_certificate_is_for_both_sides_and_no_name_of_a_client() -> None:
    ca = authority(None, "demo", NOW)
    made = certificate_in(between_processes(None, ca, "popmq", NOW))
    made.verify_directly_issued_by(certificate_in(ca))
    purposes = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(purposes) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["popmq"]


def test_the_certificate_is_renewed_a_month_before_it_ends() -> None:
    ca = authority(None, "demo", NOW)
    first = between_processes(None, ca, "popmq", NOW)
    assert between_processes(first, ca, "popmq", NOW + timedelta(days=59)) == first
    later = between_processes(first, ca, "popmq", NOW + timedelta(days=61))
    assert later["tls.crt"] != first["tls.crt"]


def test_a_new_ca_is_trusted_everywhere_before_it_signs_for_processes() -> None:
    old_ca = authority(None, "demo", NOW - timedelta(days=3_300))
    old = between_processes(None, old_ca, "popmq", NOW)
    new_ca = authority(old_ca, "demo", NOW)
    assert new_ca["tls.crt"] != old_ca["tls.crt"]
    kept = between_processes(old, new_ca, "popmq", NOW)
    assert kept["tls.crt"] == old["tls.crt"]
    assert kept["ca.crt"] == new_ca["ca.crt"] != old["ca.crt"]
    renewed = between_processes(kept, new_ca, "popmq", NOW + timedelta(days=61))
    certificate_in(renewed).verify_directly_issued_by(certificate_in(new_ca))


def test_a_renewal_restarts_no_pod() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.change(tls=WISHED)
        await world.run()
        secret = world.api.get("secrets", "apps", NAME)
        assert secret is not None
        world.restarted.clear()
        world.now += timedelta(days=61)
        await world.run()
        renewed = world.api.get("secrets", "apps", NAME)
        assert renewed is not None
        assert renewed["data"]["tls.crt"] != secret["data"]["tls.crt"]
        assert world.restarted == []

    play(story)


def process_secret() -> SecretData:
    return between_processes(None, authority(None, "demo", NOW), "popmq", NOW)


SHOWN = process_secret()
NOBODY = Signer()


@pytest.mark.parametrize(
    ("use", "secret", "server", "answers"),
    [
        (PeerRequirement.REQUIRED, SHOWN, SHOWN, True),
        (PeerRequirement.ACCEPTED, SHOWN, SHOWN, True),
        (PeerRequirement.ACCEPTED, SHOWN, {}, True),
        (PeerRequirement.REQUIRED, SHOWN, {}, False),
        (PeerRequirement.REQUIRED, SHOWN, process_secret(), False),
        (PeerRequirement.REQUIRED, {}, SHOWN, False),
        (PeerRequirement.REQUIRED, {**SHOWN, "tls.key": "AAAA"}, SHOWN, False),
    ],
    ids=["both", "accepted", "pods of before", "plain", "another CA", "no Secret", "damaged"],
)
async def test_the_operator_shows_the_certificate_to_controllers_and_asks_it_of_them(
    use: PeerRequirement, secret: SecretData, server: SecretData, answers: bool
) -> None:
    tls = None
    if server:
        parts = [base64.b64decode(server[key]) for key in ("tls.crt", "tls.key", "ca.crt")]
        tls = FrameTls.of_pem(*parts, name="popmq", required=True)
    hello = Hello(role=ProcessRole.CONTROLLER, name="controller", cluster="demo")
    frames = FrameServer(Silent(), hello, settings=FrameSettings(secret=OURS, tls=tls))
    plane = NetworkDataPlane(await frames.listen("127.0.0.1:0"))
    spec = replace(read(cluster()), tls_use=use)
    stored = StoredSecret(OURS, exists=True, owned=True)
    secrets = {NAME: secret} if secret else {}
    access = plane_access(spec, secrets, stored, SecretStage(missing=False), signer=NOBODY)
    try:
        health = await plane.health(spec, access)
    finally:
        await frames.stop()
    assert health == ({} if answers else None)
