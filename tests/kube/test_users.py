"""Users on Kubernetes: a cluster's own Secrets, and objects that declare users."""

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube.asked import Asked
from kube.clusters import cluster, read
from kube.desk import Desk
from kube.fake_api import Object
from kube.world import World
from kube.world import play as in_world

from popmq.cli.client import CallRefused, Client
from popmq.common.signing import Signer
from popmq.common.wire import admin_pb2 as admin
from popmq.operator.model.spec import SpecError
from popmq.operator.model.users import ROTATE_ANNOTATION
from popmq.operator.resources.users import signer_in
from popmq.testing.running_broker import RunningBroker

KEY, ADMIN = "demo-users-key", "demo-admin-user"
ON = {"mode": "On"}


def settings_of(world: World) -> str:
    config = world.api.get("configmaps", "apps", "demo-config")
    assert config is not None
    text: str = config["data"]["popmq.toml"]
    return text


def volume(world: World) -> Object:
    """What the proxies mount of users; empty: nothing."""
    deployment = world.api.get("deployments", "apps", "demo-proxy")
    assert deployment is not None
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    volume: Object = next((v for v in volumes if v["name"] == "users"), {})
    return volume


def mounted(world: World) -> dict[str, list[str]]:
    """The files of each Secret that proxies mount."""
    return {
        source["secret"]["name"]: [item["path"] for item in source["secret"]["items"]]
        for source in volume(world)["projected"]["sources"]
    }


def test_a_new_cluster_with_users_is_never_open() -> None:
    """Its proxies make the first user, together with auth.mode on."""

    async def story(world: World) -> None:
        world.add(cluster(auth=ON))
        await world.run()
        assert mounted(world) == {KEY: ["keys"], ADMIN: ["admin.json"]}
        assert volume(world)["projected"]["defaultMode"] == 0o440
        assert 'key_file = "/etc/popmq-users/keys"' in settings_of(world)
        assert 'admin_file = "/etc/popmq-users/admin.json"' in settings_of(world)
        secret = world.api.get("secrets", "apps", ADMIN)
        signer = signer_in(secret)
        assert signer is not None
        assert (signer.access_key, len(signer.secret)) == ("admin", 40)
        key = world.api.get("secrets", "apps", KEY)
        assert key is not None
        assert len(base64.b64decode(key["data"]["keys"])) == len("k1 \n") + 64
        assert set(world.brokers.signed_by) == {"admin"}
        condition = world.condition("Users")
        assert (condition["status"], condition["reason"]) == ("True", "On")
        assert await asked_again(world) == []
        assert world.api.get("secrets", "apps", ADMIN) == secret

    in_world(story)


async def asked_again(world: World) -> list[str]:
    """Who set the mode in another look: nobody, when it is as it should be."""
    before = len(world.brokers.signed_by)
    await world.look()
    return world.brokers.signed_by[before:]


def test_a_cluster_of_before_gets_keys_first_and_its_mode_when_every_proxy_holds_them() -> None:
    async def story(world: World) -> None:
        world.add(cluster())
        await world.run()
        assert volume(world) == {}
        assert world.condition("Users") == {}
        brokers = restart_marks(world, "broker")
        world.change(auth={"mode": "Observe"})
        world.api.after = lambda: None  # Kubernetes takes its time with the pods
        for _ in range(3):
            await world.look()
            assert world.brokers.signed_by == []
            assert world.condition("Users")["reason"] == "RollingOut"
        world.api.after = world.settle
        world.settle()
        await world.run()
        assert mounted(world) == {KEY: ["keys"]}
        assert "admin_file" not in settings_of(world)
        assert world.brokers.signed_by == ["admin"]
        assert world.condition("Users")["reason"] == "Observe"
        assert restart_marks(world, "broker") == brokers  # only proxies are others
        world.change(auth=ON)
        await world.run()
        assert world.condition("Users")["reason"] == "On"
        # What is not said stays as it is; proxies without keys would refuse everybody.
        world.change(auth={"mode": None})
        await world.run()
        assert mounted(world) == {KEY: ["keys"]}
        assert world.condition("Users")["reason"] == "On"

    in_world(story)


def restart_marks(world: World, role: str) -> set[str]:
    return {
        pod["metadata"]["annotations"]["popmq.io/template"]
        for pod in world.api.all("pods", "apps")
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] == role
    }


def test_secrets_of_another_owner_are_not_used() -> None:
    async def story(world: World) -> None:
        metadata = {"name": ADMIN, "namespace": "apps"}
        world.api.put("secrets", {"metadata": metadata, "data": {}})
        world.add(cluster(auth=ON))
        await world.run(looks=5)
        assert volume(world) == {}
        condition = world.condition("Users")
        assert (condition["status"], condition["reason"]) == ("False", "SecretUnusable")
        assert world.api.get("secrets", "apps", KEY) is None

    in_world(story)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"auth": {"mode": "Sometimes"}}, "auth.mode = Sometimes: one of Off, Observe, On"),
        ({"auth": ON, "tls": {"mode": "Disabled"}}, "needs tls.mode Own or Secret"),
        ({"config": {"auth.key_file": "/x"}}, "auth.key_file is set by the operator"),
    ],
)
def test_a_spec_of_users_that_cannot_be_says_why(spec: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        read(cluster(**spec))


# -- objects that declare users, and a whole popmq with users


@pytest.fixture(scope="module")
def popmq() -> Iterator[RunningBroker]:
    with RunningBroker(users=True) as running:
        yield running


def play(popmq: RunningBroker, story: Callable[[Desk], Awaitable[None]]) -> None:
    async def run() -> None:
        signer = Signer(popmq.access_key, popmq.secret)
        async with Desk(popmq.endpoint, signer) as desk:
            await story(desk)

    asyncio.run(run())


POLICY = [{"resources": ["topic:orders"], "actions": ["Pub", "Get", "List"]}]


def signer_of(desk: Desk, secret: str) -> Signer:
    signer = signer_in(desk.api.get("secrets", "apps", secret))
    assert signer is not None
    return signer


def may(popmq: RunningBroker, signer: Signer) -> bool:
    """Whether the cluster knows that user."""
    with Client(popmq.endpoint, signer=signer) as client:
        try:
            client.check_signature()
        except CallRefused:
            return False
    return True


def test_a_user_gets_a_secret_and_its_policy(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "orders")
        desk.declare("User", "app", policy=POLICY)
        await desk.settle()
        await desk.look()
        assert desk.condition("User", "app")["status"] == "True"
        signer = signer_of(desk, "demo-user-app")
        assert signer.access_key == "app"
        with Client(popmq.endpoint, signer=signer) as client:
            assert [topic.name for topic in client.topics(system=False)] == ["orders"]
        desk.declare("User", "app", policy=[{**POLICY[0], "effect": "Deny"}])
        await desk.settle()
        with Client(popmq.endpoint, signer=signer) as client, pytest.raises(CallRefused):
            client.topics(system=False)
        desk.declare("User", "app", policy=POLICY, enabled=False)
        await desk.settle()
        assert not may(popmq, signer)
        desk.declare("User", "app", policy=POLICY, networks=["192.0.2.0/24"])
        await desk.settle()
        with (
            Client(popmq.endpoint, signer=signer) as client,
            pytest.raises(CallRefused, match="may not call from"),
        ):
            client.topics(system=False)
        desk.declare("User", "app", policy=POLICY)
        await desk.settle()
        assert may(popmq, signer)
        desk.api.remove("users", "apps", "app")
        await desk.look()
        assert not may(popmq, signer)
        assert desk.api.get("users", "apps", "app") is None

    play(popmq, story)


def test_a_user_that_was_restored_takes_its_secret_over_where_the_cluster_does(
    popmq: RunningBroker,
) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("User", "restored", policy=POLICY)
        await desk.settle()
        before = signer_of(desk, "demo-user-restored")
        secret = desk.api.get("secrets", "apps", "demo-user-restored")
        demo = desk.api.get("brokerclusters", "apps", "demo")
        assert secret is not None
        assert demo is not None
        (owner,) = secret["metadata"]["ownerReferences"]
        secret["metadata"]["ownerReferences"] = [{**owner, "uid": "of-the-old-user"}]
        desk.api.put("secrets", secret)
        await desk.look()
        assert desk.condition("User", "restored")["reason"] == "NameTaken"
        demo["metadata"]["annotations"] = {"popmq.io/adopt": "true"}
        desk.api.put("brokerclusters", demo)
        await desk.settle()
        assert desk.condition("User", "restored")["status"] == "True"
        assert signer_of(desk, "demo-user-restored") == before
        assert may(popmq, before)

    play(popmq, story)


def test_a_secret_is_rotated_by_annotation_and_the_older_one_stays_good(
    popmq: RunningBroker,
) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("User", "turning", policy=POLICY)
        await desk.look()
        old = signer_of(desk, "demo-user-turning")
        for turn in ("first", "second"):
            user = desk.api.get("users", "apps", "turning")
            assert user is not None
            user["metadata"].setdefault("annotations", {})[ROTATE_ANNOTATION] = turn
            desk.api.put("users", user)
            await desk.look()
            new = signer_of(desk, "demo-user-turning")
            assert new.secret != old.secret
            assert may(popmq, new)
            assert may(popmq, old)
            await desk.look()
            assert signer_of(desk, "demo-user-turning") == new
            old = new
        secret = desk.api.get("secrets", "apps", "demo-user-turning")
        assert secret is not None
        assert set(secret["data"]) == {"access_key", "secret"}

    play(popmq, story)


@pytest.mark.parametrize("fault", ["error", "lost"])
def test_a_rotation_that_is_cut_off_anywhere_leaves_a_secret_that_is_good(
    popmq: RunningBroker, fault: str
) -> None:
    """Each write of a Secret fails in turn: before it is done, or after it."""

    async def story(desk: Desk) -> None:
        name = f"cut-{fault}"
        desk.declare("User", name, policy=POLICY)
        await desk.settle()
        for failing in range(4):
            before = signer_of(desk, f"demo-user-{name}")
            user = desk.api.get("users", "apps", name)
            assert user is not None
            user["metadata"].setdefault("annotations", {})[ROTATE_ANNOTATION] = f"turn {failing}"
            desk.api.put("users", user)
            left = [failing]

            def faulty(asked: Asked, left: list[int] = left) -> str:
                if asked.plural != "secrets" or not asked.writes:
                    return ""
                left[0] -= 1
                return fault if left[0] == -1 else ""

            desk.api.fault = faulty
            await desk.settle()
            desk.api.fault = lambda asked: ""
            await desk.settle()
            after = signer_of(desk, f"demo-user-{name}")
            assert after.secret != before.secret
            assert may(popmq, after)
            assert may(popmq, before)

    play(popmq, story)


def test_a_bad_object_harms_only_itself(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("User", "good", policy=POLICY)
        desk.declare("User", "twin", name="good", policy=POLICY)
        desk.declare("User", "root", name="admin")
        desk.declare("User", "odd", policy=[{"resources": ["planet:x"], "actions": ["Pub"]}])
        desk.declare("User", "robber", secretName="demo-admin-user")
        desk.declare("User", "list", policy="everything")
        await desk.look()
        reasons = {
            name: desk.condition("User", name)["reason"]
            for name in ("good", "twin", "root", "odd", "robber", "list")
        }
        assert reasons == {
            "good": "AsWanted",
            "twin": "Duplicate",
            "root": "Reserved",
            "odd": "InvalidSpec",
            "robber": "NameTaken",
            "list": "InvalidSpec",
        }
        assert may(popmq, signer_of(desk, "demo-user-good"))
        assert signer_of(desk, "demo-admin-user").access_key == "admin"
        assert may(popmq, signer_of(desk, "demo-admin-user"))
        desk.api.remove("users", "apps", "good")
        await desk.look()

    play(popmq, story)


def test_a_secret_that_somebody_deleted_is_made_anew(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("User", "loser", policy=POLICY)
        await desk.look()
        old = signer_of(desk, "demo-user-loser")
        desk.api.remove("secrets", "apps", "demo-user-loser")
        await desk.look()
        new = signer_of(desk, "demo-user-loser")
        assert new.secret != old.secret
        assert may(popmq, new)

    play(popmq, story)


def test_without_users_of_the_cluster_a_user_says_so(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        desk.api.put("brokerclusters", cluster())
        desk.declare("User", "early")
        await desk.look()
        assert desk.condition("User", "early")["reason"] == "UsersOff"
        assert desk.api.get("secrets", "apps", "demo-user-early") is None

    play(popmq, story)


def test_the_users_of_the_page_about_a_team_are_made_as_it_says(popmq: RunningBroker) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "team.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)

    async def story(desk: Desk) -> None:
        for user in yaml.safe_load_all(text):
            desk.declare(user["kind"], user["metadata"]["name"], **user["spec"])
        await desk.look()
        for name in ("shop-lead", "shop-sender"):
            assert desk.condition("User", name)["reason"] == "AsWanted"
            assert f"demo-user-{name}" in page
            assert may(popmq, signer_of(desk, f"demo-user-{name}"))
        with Client(popmq.endpoint, signer=signer_of(desk, "demo-user-shop-lead")) as client:
            client.topic(admin.CreateTopicRequest(topic=admin.Topic(name="shop%orders")))
            with pytest.raises(CallRefused, match="40300"):
                client.topic(admin.CreateTopicRequest(topic=admin.Topic(name="other%orders")))

    play(popmq, story)
