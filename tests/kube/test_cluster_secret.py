"""The secret of a cluster: a new one requires it at once, one of before in two rolls."""

import base64
from dataclasses import replace

import pytest
from kube.asked import Asked
from kube.clusters import cluster, read
from kube.fake_api import Object
from kube.world import World, play, running

from popmq.common.protocol.cluster_secret import ClusterSecret, parse_cluster_secret
from popmq.common.protocol.frame_server import FrameServer
from popmq.common.protocol.frames import FrameSettings, Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.wire import controller_pb2 as pb
from popmq.operator.cluster.cluster_secrets import PlaneAccess
from popmq.operator.cluster.data_plane import NetworkDataPlane
from popmq.operator.cluster.desired import ClusterInputs, desired, first_shapes
from popmq.operator.cluster.secret_stage import StoredSecret, secret_stage
from popmq.operator.model.manifest import Manifest, kind_of
from popmq.operator.model.stages import PeerRequirement

NAME = "demo-cluster-secret"
USE = "popmq.io/cluster-secret"
OURS = ClusterSecret((b"k" * 64,))


def uses(world: World) -> set[str]:
    """Of the secret, by pods of every role."""
    return {
        pod["metadata"]["annotations"].get(USE, "none") for pod in world.api.all("pods", "apps")
    }


def text_of(world: World) -> bytes:
    secret = world.api.get("secrets", "apps", NAME)
    assert secret is not None
    return base64.b64decode(secret["data"]["secret"])


def made_before(world: World) -> Object:
    """A cluster as an operator left it that knew of no secret."""
    given = cluster()
    world.add(given)
    stored = world.api.get("brokerclusters", "apps", "demo")
    assert stored is not None
    spec = replace(read(stored), secret_use=PeerRequirement.NONE, image="popmq:1")
    inputs = ClusterInputs(world.now, new_cluster_secret=False)
    for manifest in desired(spec, first_shapes(spec), inputs):
        world.api.put(kind_of(manifest).plural, manifest)
    world.settle()
    return stored


def test_a_new_cluster_requires_its_secret_at_once() -> None:
    async def story(world: World) -> None:
        world.add(cluster())
        await world.look()
        assert uses(world) == {"required"}
        assert len(parse_cluster_secret(text_of(world), "the Secret").secrets) == 1
        config = world.api.get("configmaps", "apps", "demo-config")
        assert config is not None
        assert 'secret_file = "/etc/popmq-secret/secret"' in config["data"]["popmq.toml"]
        assert "secret_required" not in config["data"]["popmq.toml"]
        await world.run()
        assert world.condition("Authenticated")["reason"] == "Required"

    play(story)


def test_a_cluster_of_before_gets_its_secret_in_two_rolls() -> None:
    """No pod that requires it may run beside one that does not hold it."""

    async def story(world: World) -> None:
        made_before(world)
        assert uses(world) == {"none"}
        world.restarted.clear()
        seen = []
        for _ in range(80):
            outcome = await world.look()
            seen.append(uses(world))
            assert not {"none", "required"} <= uses(world), seen
            if not outcome.soon:
                break
        assert seen[0] == {"none"}, "nothing is rolled for the Secret alone"
        assert {"accepted"} in seen, seen
        assert uses(world) == {"required"}
        brokers = [name for name in world.restarted if "broker" in name]
        assert sorted(brokers) == sorted(world.pods() * 2)
        assert world.down["demo-broker-0"] <= 1
        verdict = world.condition("Authenticated")
        assert (verdict["status"], verdict["reason"]) == ("True", "Required")

    play(story)


@pytest.mark.more
def test_the_second_roll_waits_for_the_last_pod_without_the_secret() -> None:
    async def story(world: World) -> None:
        made_before(world)
        world.unready.add("demo-broker-0-2")
        world.settle()
        for _ in range(20):
            await world.look()
        assert "required" not in uses(world)
        verdict = world.condition("Authenticated")
        assert (verdict["status"], verdict["reason"]) == ("False", "RollingOut")
        assert "demo-broker-0-" in verdict["message"]
        world.unready.clear()
        world.settle()
        await world.run()
        assert uses(world) == {"required"}

    play(story)


def test_a_pod_that_somebody_adds_does_not_take_the_requirement_back() -> None:
    async def story(world: World) -> None:
        await running(world)
        pod = world.api.get("pods", "apps", "demo-broker-0-0")
        assert pod is not None
        del pod["metadata"]["annotations"][USE]
        pod["metadata"]["name"] = "extra-0"
        world.api.put("pods", pod)
        for _ in range(3):
            outcome = await world.look()
        assert not outcome.soon, "nothing can come of it"
        group_set = world.api.get("statefulsets", "apps", "demo-broker-0")
        assert group_set is not None
        assert group_set["spec"]["template"]["metadata"]["annotations"][USE] == "required"

    play(story)


def test_the_secret_is_never_overwritten() -> None:
    async def story(world: World) -> None:
        await running(world)
        secret = world.api.get("secrets", "apps", NAME)
        assert secret is not None
        both = text_of(world) + b"n" * 64 + b"\n"
        secret["data"]["secret"] = base64.b64encode(both).decode()
        world.api.put("secrets", secret)
        world.change(image="popmq:2")
        await world.run()
        assert text_of(world) == both
        assert world.condition("Authenticated")["status"] == "True"

    play(story)


def test_a_secret_that_another_operator_creates_at_the_same_moment_stays() -> None:
    async def story(world: World) -> None:
        theirs = {"secret": base64.b64encode(b"t" * 64).decode()}
        owner = {"uid": "uid-101", "kind": "BrokerCluster"}

        def fault(asked: Asked) -> str:
            if (asked.verb, asked.plural) == ("create", "secrets"):
                uid = (world.api.get("brokerclusters", "apps", "demo") or {})["metadata"]["uid"]
                metadata = {"name": NAME, "namespace": "apps"}
                owned = {**metadata, "ownerReferences": [{**owner, "uid": uid}]}
                world.api.put("secrets", {"metadata": owned, "data": theirs})
            return ""

        world.api.fault = fault
        await running(world)
        assert text_of(world) == b"t" * 64

    play(story)


@pytest.mark.parametrize("before", [False, True])
def test_a_secret_of_another_owner_is_mounted_by_no_pod(before: bool) -> None:
    async def story(world: World) -> None:
        foreign = {"secret": base64.b64encode(b"f" * 64).decode()}
        world.api.put("secrets", {"metadata": {"name": NAME, "namespace": "apps"}, "data": foreign})
        if before:
            made_before(world)
        else:
            world.add(cluster())
        for _ in range(5):
            await world.look()
        assert uses(world) == {"none"}
        mounted = [volume for pod in world.api.all("pods") for volume in pod["spec"]["volumes"]]
        assert NAME not in {(volume.get("secret") or {}).get("secretName") for volume in mounted}
        assert world.condition("Authenticated")["reason"] == "NameTaken"
        assert world.condition("Reconciled")["reason"] == "NameTaken"

    play(story)


def test_a_secret_that_roles_could_not_read_is_told_and_rolls_nothing() -> None:
    async def story(world: World) -> None:
        stored = made_before(world)
        owner = {"uid": stored["metadata"]["uid"], "kind": "BrokerCluster"}
        metadata = {"name": NAME, "namespace": "apps", "ownerReferences": [owner]}
        short = {"secret": base64.b64encode(b"short").decode()}
        world.api.put("secrets", {"metadata": metadata, "data": short})
        world.restarted.clear()
        for _ in range(5):
            await world.look()
        assert world.restarted == []
        verdict = world.condition("Authenticated")
        assert (verdict["status"], verdict["reason"]) == ("False", "Unusable")
        assert f"key secret of Secret {NAME}: line 1 has 5 bytes" in verdict["message"]

    play(story)


def test_a_spec_may_leave_it_at_pods_that_accept_peers_without_the_secret() -> None:
    """Before one goes back to an operator that knows of no secret."""

    async def story(world: World) -> None:
        await running(world)
        world.change(config={"cluster.secret_required": "false"})
        await world.run()
        assert uses(world) == {"accepted"}
        assert world.condition("Authenticated")["reason"] == "NotRequired"
        world.change(config={"cluster.secret_required": "true"})
        await world.run()
        assert uses(world) == {"required"}

    play(story)


def pod(name: str, created: str) -> Manifest:
    annotations = {USE: "required"}
    return {"metadata": {"name": name, "creationTimestamp": created, "annotations": annotations}}


def test_pods_that_are_older_than_the_secret_hold_another() -> None:
    stored = StoredSecret(OURS, exists=True, owned=True, created="2030-01-02T00:00:00Z")
    old, new = pod("demo-proxy-a", "2030-01-01T00:00:00Z"), pod("b", "2030-01-02T00:00:00Z")
    verdict = secret_stage(read(cluster()), stored, [], [old, new]).verdict
    assert (verdict.status, verdict.reason) == ("False", "Replaced")
    assert "demo-proxy-a hold the one before" in verdict.message
    assert secret_stage(read(cluster()), stored, [], [new]).verdict.reason == "Required"


class Silent:
    """hop.Port of a controller of a cluster without brokers."""

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        on_reply(pb.ListReplicasReply(owner="nobody").SerializeToString())
        return 0

    def cancel(self, request_id: int) -> None: ...


@pytest.mark.parametrize(
    ("held", "required", "server", "answers"),
    [
        (OURS, True, FrameSettings(secret=OURS), True),
        (OURS, False, FrameSettings(secret_required=False), True),
        (None, False, FrameSettings(secret=OURS, secret_required=False), True),
        (None, False, FrameSettings(secret=OURS), False),
        (ClusterSecret((b"x" * 64,)), True, FrameSettings(secret=OURS), False),
        (OURS, True, FrameSettings(secret_required=False), False),
    ],
    ids=["both", "pods of before", "before the Secret", "without", "another", "no proof of theirs"],
)
async def test_the_operator_proves_the_secret_to_controllers_and_asks_it_of_them(
    held: ClusterSecret | None, required: bool, server: FrameSettings, answers: bool
) -> None:
    hello = Hello(role=ProcessRole.CONTROLLER, name="controller", cluster="demo")
    frames = FrameServer(Silent(), hello, settings=server)
    plane = NetworkDataPlane(await frames.listen("127.0.0.1:0"))
    access = PlaneAccess(frames=FrameSettings(secret=held, secret_required=required))
    try:
        health = await plane.health(read(cluster()), access)
    finally:
        await frames.stop()
    assert health == ({} if answers else None)
