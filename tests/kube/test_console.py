"""The web console of a BrokerCluster: its objects, who may reach it, its condition."""

import sys
from typing import Any

import pytest
from kube.clusters import cluster, read
from kube.fake_api import Object
from kube.test_builders import made, named, of_kind
from kube.world import World, play, running
from programs import run_program

from popmq.operator.model.spec import SpecError, read_spec

NAME = "demo-console"
INGRESS = {
    "host": "queue.example",
    "className": "nginx",
    "tlsSecretName": "queue-tls",
    "annotations": {"example.com/a": "b"},
}


def container_of(given: Object) -> Object:
    deployment = named(made(given), "Deployment", NAME)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    console: Object = container
    return console


def test_a_cluster_has_a_console_only_where_it_is_asked_for() -> None:
    kinds = ("Deployment", "Service", "NetworkPolicy", "Ingress")

    def found(given: Object) -> list[str]:
        return [kind for kind in kinds if _has(made(given), kind)]

    assert found(cluster()) == []
    assert found(cluster(console={})) == ["Deployment", "Service", "NetworkPolicy"]
    assert found(cluster(console={"ingress": INGRESS})) == list(kinds)
    without = cluster(console={}, networkPolicy={"enabled": False})
    assert found(without) == ["Deployment", "Service"]


def _has(objects: list[Object], kind: str) -> bool:
    return any(item["metadata"]["name"] == NAME for item in of_kind(objects, kind))


def test_the_console_calls_the_proxies_over_tls_and_holds_no_secret() -> None:
    deployment = named(made(cluster(console={})), "Deployment", NAME)
    pod = deployment["spec"]["template"]["spec"]
    env = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
    assert env == {
        "POPMQ_ENDPOINT": "tls://demo-proxy.apps.svc:8081",
        "POPMQ_ADMIN_ENDPOINT": "tls://demo-admin.apps.svc:8082",
        "POPMQ_TLS_CA": "/etc/popmq-tls/ca.crt",
    }
    assert pod["automountServiceAccountToken"] is False
    assert [set(volume) - {"name"} for volume in pod["volumes"]] == [{"emptyDir"}, {"configMap"}]
    plain = container_of(cluster(console={}, tls={"mode": "Disabled"}))
    assert plain["env"][0]["value"] == "demo-proxy.apps.svc:8081"
    # A certificate of the user's whose Secret names no authority: those of the image are trusted.
    own = container_of(cluster(console={}, tls={"mode": "Secret", "secretName": "mine"}))
    assert [entry["name"] for entry in own["env"]] == ["POPMQ_ENDPOINT", "POPMQ_ADMIN_ENDPOINT"]


@pytest.mark.more
@pytest.mark.parametrize(
    ("auth", "console", "argument"),
    [
        (None, {}, "--login"),
        ({"mode": "On"}, {}, "--login"),
        ({"mode": "On"}, {"openToAnybody": True}, "--login"),
        (None, {"openToAnybody": True}, "--open-to-anybody"),
    ],
)
def test_it_asks_for_a_login_unless_a_cluster_without_users_opens_it(
    auth: dict[str, str] | None, console: dict[str, Any], argument: str
) -> None:
    async def story(world: World) -> None:
        await running(world, cluster(console=console, auth=auth or {}))
        deployment = world.api.get("deployments", "apps", NAME)
        assert deployment is not None
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert container["args"] == ["console", "--listen=0.0.0.0:8083", argument]

    play(story)


def test_its_pods_reach_the_proxies_alone_and_are_let_in_there() -> None:
    callers = [{"podSelector": {"matchLabels": {"app": "ingress"}}}]
    objects = made(cluster(console={}, networkPolicy={"clients": [], "console": callers}))
    policy = named(objects, "NetworkPolicy", NAME)["spec"]
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8083}], "from": callers}]
    ports = [[port["port"] for port in rule["ports"]] for rule in policy["egress"]]
    assert ports == [[8081, 8082], [53, 53]]
    public, admin, _ = named(objects, "NetworkPolicy", "demo-proxy")["spec"]["ingress"]
    for rule in (public, admin):
        roles = [
            peer["podSelector"]["matchLabels"].get("app.kubernetes.io/component")
            for peer in rule["from"]
        ]
        assert "console" in roles


def test_an_ingress_leads_to_its_service() -> None:
    objects = made(cluster(console={"ingress": INGRESS}))
    ingress = named(objects, "Ingress", NAME)
    assert ingress["metadata"]["annotations"] == {"example.com/a": "b"}
    assert ingress["spec"]["ingressClassName"] == "nginx"
    assert ingress["spec"]["tls"] == [{"hosts": ["queue.example"], "secretName": "queue-tls"}]
    (rule,) = ingress["spec"]["rules"]
    assert rule["host"] == "queue.example"
    service = named(objects, "Service", NAME)
    (port,) = service["spec"]["ports"]
    assert rule["http"]["paths"][0]["backend"]["service"] == {
        "name": NAME,
        "port": {"name": port["name"]},
    }
    plain = named(made(cluster(console={"ingress": {"host": "a.example"}})), "Ingress", NAME)
    assert set(plain["spec"]) == {"rules"}


def test_what_a_console_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match=r"console\.ingress: needs host"):
        read(cluster(console={"ingress": {}}))
    with pytest.raises(SpecError, match=r"spec\.console\.image = evil:1: operator\.images allows"):
        read_spec(cluster(console={"image": "evil:1"}), default_image="popmq:1", images=("popmq:",))


@pytest.mark.more
def test_the_console_goes_with_its_field_and_restarts_no_other_pod() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.restarted.clear()
        world.change(console={"ingress": INGRESS})
        await world.run()
        assert world.restarted == ["demo-console-pod-0"]
        assert world.condition("Authenticated")["reason"] == "Required"
        for plural in ("deployments", "services", "networkpolicies", "ingresses"):
            assert world.api.get(plural, "apps", NAME) is not None
        world.change(console=None)
        await world.run()
        for plural in ("deployments", "services", "networkpolicies", "ingresses"):
            assert world.api.get(plural, "apps", NAME) is None
        assert world.condition("Console") == {}

    play(story)


@pytest.mark.more
def test_its_condition_says_where_it_is_and_what_it_lacks() -> None:
    async def story(world: World) -> None:
        await running(world, cluster(console={}))
        condition = world.condition("Console")
        assert (condition["status"], condition["reason"]) == ("False", "NoUsers")
        world.change(console={"openToAnybody": True})
        await world.run()
        await world.look()
        condition = world.condition("Console")
        assert (condition["status"], condition["reason"]) == ("True", "Serving")
        assert condition["message"] == "kubectl port-forward service/demo-console 8083"

    play(story)


@pytest.mark.more
def test_a_console_that_does_not_start_says_why_and_nothing_waits_for_it() -> None:
    words = last_words_without_the_extra()

    async def story(world: World) -> None:
        await running(world, cluster(console={"openToAnybody": True}))
        for last_words, reason in ((words, "ImageLacksConsole"), ("out of memory", "NotReady")):
            pod = world.api.get("pods", "apps", "demo-console-pod-0")
            assert pod is not None
            ended = {"lastState": {"terminated": {"message": last_words}}}
            waiting = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}
            conditions = [{"type": "Ready", "status": "False"}]
            pod["status"] = {"conditions": conditions, "containerStatuses": [ended | waiting]}
            stored = world.api.objects["pods", "apps", "demo-console-pod-0"]
            stored.body["status"] = pod["status"]
            deployments = world.api.objects["deployments", "apps", NAME]
            deployments.body["status"]["readyReplicas"] = 0
            world.api.after = lambda: None
            assert not (await world.look()).soon
            condition = world.condition("Console")
            assert (condition["status"], condition["reason"]) == ("False", reason)
            assert last_words.strip() in condition["message"]
            assert world.condition("Ready")["status"] == "True"

    play(story)


def last_words_without_the_extra() -> str:
    """What `popmq console` says in an image that lacks the packages."""
    program = (
        "import sys; sys.modules['uvicorn'] = None; from popmq.cli.__main__ import main; "
        "sys.exit(main(['console', '--listen', '127.0.0.1:0']))"
    )
    done = run_program([sys.executable, "-c", program], timeout=30)
    assert done.returncode != 0
    return done.stderr
