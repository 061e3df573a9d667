"""An operator process with its chart's rights on a real API server: bad objects beside good ones.

No controller of Kubernetes runs; the test makes the pods and says that they are ready.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube.chart_operator import ChartOperator, install_chart, make_pods, refused_requests
from kube.control_plane import ControlPlane
from kube.fake_api import Object
from kube.running import given
from kube.voices import Voice

from popmq.testing.running_broker import RunningBroker

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

BAD, GOOD = 10, 3  # of each kind
CONVERGED_S = 10.0
APPS = "/apis/popmq.io/v1beta1/namespaces/apps"
PLURALS = {"LagReport": "lagreports", "Topic": "topics", "ConsumerGroup": "consumergroups"}
# Each passes the definition, and something else refuses it.
BAD_SPECS: dict[str, Object] = {
    "LagReport": {"timeZone": "Mars/Olympus"},
    "Topic": {"retention": "99999d"},
    "ConsumerGroup": {"backOff": ["99999d"]},
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("kube"), controllers=False) as plane:
        install_chart(plane)
        yield plane


@pytest.fixture
def operator(plane: ControlPlane, tmp_path: Path) -> Iterator[ChartOperator]:
    """On a cluster whose brokers are as their pods."""
    with Voice(plane, "apps", "demo") as voice, RunningBroker() as broker:
        settings = {
            "POPMQ_OPERATOR_CONTROLLER_ADDRESS": voice.address,
            "POPMQ_OPERATOR_PROXY_ADDRESS": broker.endpoint,
        }
        with ChartOperator(plane, tmp_path, settings) as operator:
            yield operator


def _applied(plane: ControlPlane, kind: str, name: str, /, **spec: Any) -> None:
    body = given(name, "apps", **spec)
    plane.apply({**body, "kind": kind, "spec": {"cluster": "demo", **spec}})


def _condition(plane: ControlPlane, path: str, kind: str = "Ready") -> Object:
    known = ((plane.get(f"{APPS}/{path}") or {}).get("status") or {}).get("conditions") or []
    return next((item for item in known if item["type"] == kind), {})


def _is(status: str, plane: ControlPlane, *paths: str) -> Callable[[], bool]:
    return lambda: all(_condition(plane, path).get("status") == status for path in paths)


def test_forty_bad_objects_harm_themselves_only(
    plane: ControlPlane, operator: ChartOperator
) -> None:
    plane.apply(given("demo", "apps"))
    make_pods(plane, "demo")
    plane.wait("the cluster", _is("True", plane, "brokerclusters/demo"))
    bad: list[str] = []
    for kind, spec in BAD_SPECS.items():
        for number in range(BAD):
            _applied(plane, kind, f"bad-{number}", **spec)
            bad.append(f"{PLURALS[kind]}/bad-{number}")
    for number in range(BAD):
        plane.apply(given(f"bad-{number}", "apps", config={"store.nope": "1"}))
        bad.append(f"brokerclusters/bad-{number}")
    begun_s = time.monotonic()
    good = [f"{plural}/good-{number}" for plural in PLURALS.values() for number in range(GOOD)]
    for kind in PLURALS:
        for number in range(GOOD):
            _applied(plane, kind, f"good-{number}")
    plane.wait("the good", _is("True", plane, *good))
    took_s = time.monotonic() - begun_s
    print(f"{len(good)} good beside {len(bad)} bad: {took_s:.1f} s")
    assert took_s <= CONVERGED_S
    plane.wait("the bad", _is("False", plane, *bad))
    assert "unknown time zone" in _condition(plane, "lagreports/bad-0")["message"]
    assert "store.retention_hours" in _condition(plane, "topics/bad-0")["message"]
    assert "spec.config[store.nope]" in _condition(plane, "brokerclusters/bad-0")["message"]

    # A refused Service stops neither a fence nor a roll.
    service = {"type": "LoadBalancer", "loadBalancerClass": "a b c"}
    wanted = given("demo", "apps", image="popmq:2", proxies={"service": service})
    wanted["metadata"]["annotations"] = {"popmq.io/fence": "demo-broker-0-2"}
    first = {pod["metadata"]["uid"] for pod in plane.items("/api/v1/namespaces/apps/pods")}
    plane.apply(wanted)

    def is_refused() -> bool:
        return _condition(plane, "brokerclusters/demo", "Reconciled").get("status") == "False"

    def is_fenced() -> bool:
        events = plane.items("/api/v1/namespaces/apps/events?fieldSelector=reason=Fence")
        return len(events) == 1

    def is_rolled() -> bool:
        sets = plane.get("/apis/apps/v1/namespaces/apps/statefulsets/demo-broker-0") or {}
        seen = {"observedGeneration": sets["metadata"]["generation"], "replicas": 3}
        path = "/apis/apps/v1/namespaces/apps/statefulsets/demo-broker-0/status"
        plane.patch(path, {"status": seen})
        there = {item["metadata"]["uid"] for item in plane.items("/api/v1/namespaces/apps/pods")}
        return not first <= there

    plane.wait("the refusal", is_refused)
    refusal = _condition(plane, "brokerclusters/demo", "Reconciled")
    assert refusal["reason"] == "Refused"
    assert "Service demo-proxy" in refusal["message"]
    assert "spec.loadBalancerClass" in refusal["message"]
    plane.wait("the fence", is_fenced)
    plane.wait("the roll", is_rolled)

    for path in bad:
        plane.delete(f"{APPS}/{path}", {})
    plane.wait(
        "the end of the bad", lambda: all(plane.get(f"{APPS}/{item}") is None for item in bad)
    )
    assert operator.process.poll() is None
    assert refused_requests(plane) == []
