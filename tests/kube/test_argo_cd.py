"""The health checks for Argo CD, run by its Lua, on what the operator writes."""

from typing import Any

import pytest
import yaml
from kube.clusters import cluster
from kube.control_plane import ROOT
from kube.fake_api import Object
from kube.test_lag_reports import report
from kube.world import World, play, running
from lupa import lua51

CHECKS = yaml.safe_load((ROOT / "deploy" / "argo-cd.yaml").read_text(encoding="utf-8"))["data"]
PREFIX = "resource.customizations.health.popmq.io_"


def health(given: Object) -> tuple[str, str]:
    """Status and message of an object as the API server has it."""
    lua = lua51.LuaRuntime()
    # Argo CD's Lua has these libraries alone.
    for library in ("string", "math", "io", "os", "debug", "python"):
        lua.globals()[library] = None
    lua.globals()["obj"] = lua.table_from(given, recursive=True)
    result = lua.execute(CHECKS[f"{PREFIX}{given['kind']}"])
    return result["status"], result["message"]


def declared(kind: str, **status: Any) -> Object:
    return {"kind": kind, "metadata": {"name": "x", "generation": 2}, "status": status}


def ready(status: str, reason: str, *, seen: int = 2) -> Object:
    condition = {"type": "Ready", "status": status, "reason": reason, "message": "why"}
    return {"observedGeneration": seen, "conditions": [condition]}


def test_every_kind_has_a_check() -> None:
    kinds = {
        yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]["names"]["kind"]
        for path in (ROOT / "crds").glob("*.yaml")
    }
    assert set(CHECKS) == {f"{PREFIX}{kind}" for kind in kinds}
    for kind in kinds:
        new = {"kind": kind, "metadata": {"name": "x", "generation": 1}}
        assert health(new)[0] == "Progressing"


@pytest.mark.parametrize("kind", ["Topic", "ConsumerGroup", "User"])
@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (ready("True", "AsWanted"), "Healthy"),
        (ready("True", "AsWanted", seen=1), "Progressing"),
        (ready("False", "CannotChange"), "Degraded"),
        (ready("False", "InvalidSpec"), "Degraded"),
        (ready("False", "NoCluster"), "Progressing"),
        (ready("False", "NoAnswer"), "Progressing"),
        ({"observedGeneration": 2}, "Progressing"),
    ],
)
def test_what_is_declared_is_as_healthy_as_it_is_ready(
    kind: str, status: Object, expected: str
) -> None:
    assert health(declared(kind, **status))[0] == expected


def of(world: World, kind: str = "BrokerCluster", name: str = "demo") -> tuple[str, str]:
    stored = world.api.get(f"{kind.lower()}s", "apps", name)
    assert stored is not None
    return health({**stored, "kind": kind})


@pytest.mark.more
def test_a_cluster_is_healthy_once_it_serves_and_never_degraded_before() -> None:
    async def story(world: World) -> None:
        world.add(cluster())
        before = []
        while of(world)[0] != "Healthy":
            before.append(of(world))
            await world.look()
            assert len(before) < 30, before
        assert {status for status, _ in before} == {"Progressing"}
        world.change(image="popmq:2")
        assert of(world)[0] == "Progressing"
        await world.run()
        assert of(world)[0] == "Healthy"

    play(story)


@pytest.mark.more
def test_a_cluster_that_is_refused_paused_or_without_a_master_is_not_healthy() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.change(config={"store.nope": "1"})
        await world.look()
        status, message = of(world)
        assert status == "Degraded"
        assert "store.nope" in message
        world.change(config={"store.nope": None})
        world.annotate("popmq.io/pause", "true")
        stored = world.api.get("brokerclusters", "apps", "demo")
        assert stored is not None
        stored["spec"]["config"] = {}
        world.api.put("brokerclusters", stored)
        await world.look()
        assert of(world)[0] == "Suspended"
        world.annotate("popmq.io/pause", None)
        await world.run()
        world.unready = set(world.pods())
        world.brokers.masters.clear()
        world.settle()
        await world.look()
        assert world.condition("Ready")["reason"] == "NoMaster"
        assert of(world)[0] == "Degraded"

    play(story)


@pytest.mark.more
def test_a_report_is_degraded_while_its_runs_fail() -> None:
    async def story(world: World) -> None:
        await running(world)
        for name, suspend in (("hourly", False), ("never", True)):
            world.api.put("lagreports", report(name, suspend=suspend))
        await world.look()
        assert of(world, "LagReport", "hourly")[0] == "Healthy"
        assert of(world, "LagReport", "never")[0] == "Suspended"
        stored = world.api.objects["cronjobs", "apps", "demo-report-hourly"]
        stored.body["status"] = {"lastScheduleTime": "2030-01-01T10:00:00Z"}
        await world.look()
        status, message = of(world, "LagReport", "hourly")
        assert (status, "kubectl logs" in message) == ("Degraded", True)

    play(story)
