"""What a BrokerCluster becomes: whole objects in golden files, and the rules that they keep."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube.clusters import LARGE, SMALL, cluster, read
from kube.control_plane import ROOT

from popmq.operator.cluster.desired import ClusterInputs, desired, first_shapes
from popmq.operator.model.manifest import Manifest, at, kind_of, name_of

GOLDEN = Path(__file__).parent / "golden"
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def made(given: Manifest) -> list[Manifest]:
    spec = read(given)
    return desired(spec, first_shapes(spec), ClusterInputs(NOW))


def of_kind(objects: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in objects if manifest["kind"] == kind]


def pods_of(objects: list[Manifest]) -> list[Manifest]:
    return [
        manifest["spec"]["template"] for manifest in objects if at(manifest, "spec", "template")
    ]


def named(objects: list[Manifest], kind: str, name: str) -> Manifest:
    return next(manifest for manifest in of_kind(objects, kind) if name_of(manifest) == name)


@pytest.mark.parametrize(("name", "given"), [("small", SMALL), ("large", LARGE)])
def test_a_cluster_becomes_what_its_golden_file_says(name: str, given: Manifest) -> None:
    objects = made(given)
    authorities = [item for item in of_kind(objects, "ConfigMap") if name_of(item)[-3:] == "-ca"]
    for secret in [*of_kind(objects, "Secret"), *authorities]:
        secret["data"] = dict.fromkeys(secret["data"], "")  # new keys each time
    text = "# Written by tests/kube/test_builders.py with POPMQ_GOLDEN=write.\n"
    text += yaml.safe_dump_all(objects, sort_keys=False, width=100)
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("POPMQ_GOLDEN") == "write":
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["", "https://docs.example/reference/alerts.html"])
def test_the_alerts_of_a_cluster_lead_to_sections_of_the_page_of_alerts(page: str) -> None:
    monitoring = {"rules": True, **({"runbookUrl": page} if page else {})}
    (rules,) = of_kind(made(cluster(monitoring=monitoring)), "PrometheusRule")
    urls = [
        rule["annotations"]["runbook_url"]
        for group in rules["spec"]["groups"]
        for rule in group["rules"]
    ]
    text = (ROOT / "docs" / "reference" / "alerts.md").read_text(encoding="utf-8")
    sections = {line[3:].lower() for line in text.splitlines() if line.startswith("## ")}
    assert {url.partition("#")[0] for url in urls} == {page or "docs/reference/alerts.md"}
    assert {url.partition("#")[2] for url in urls} <= sections


@pytest.mark.parametrize("given", [SMALL, LARGE])
def test_every_pod_keeps_to_pod_security_restricted(given: Manifest) -> None:
    pods = pods_of(made(given))
    assert len(pods) >= 3
    for pod in pods:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        for volume in spec["volumes"]:
            assert set(volume) - {"name"} <= {"configMap", "emptyDir", "secret"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("role", ["brokers", "proxies", "controller", "console"])
def test_a_template_adds_to_the_pods_of_its_role_and_takes_nothing_away(role: str) -> None:
    template: dict[str, Any] = {
        "schedulerName": "packing",
        "env": [{"name": "TZ", "value": "Europe/Berlin"}],
        "volumes": [{"name": "extra", "secret": {"secretName": "extra"}}],
        "volumeMounts": [{"name": "extra", "mountPath": "/etc/extra"}],
    }
    parts: dict[str, Any] = {"console": {}, role: {"template": template}}
    component = {"brokers": "broker", "proxies": "proxy"}.get(role, role)
    for before, after in zip(
        pods_of(made(cluster(console={}))), pods_of(made(cluster(**parts))), strict=True
    ):
        is_meant = before["metadata"]["labels"]["app.kubernetes.io/component"] == component
        added = 1 if is_meant else 0
        old, new = before["spec"], after["spec"]
        assert new.get("schedulerName") == ("packing" if is_meant else None)
        assert new["volumes"] == old["volumes"] + template["volumes"][:added]
        (was,), (container,) = old["containers"], new["containers"]
        assert container["env"] == was["env"] + template["env"][:added]
        assert container["volumeMounts"] == was["volumeMounts"] + template["volumeMounts"][:added]


def test_only_the_controller_has_a_token() -> None:
    tokens = {
        pod["spec"]["containers"][0]["name"]: pod["spec"]["automountServiceAccountToken"]
        for pod in pods_of(made(SMALL))
    }
    assert tokens == {"broker": False, "proxy": False, "controller": True}


def test_network_policies_name_exactly_the_ports_of_the_roles() -> None:
    ports = {}
    for policy in of_kind(made(SMALL), "NetworkPolicy"):
        rules = policy["spec"].get("ingress", [])
        ports[name_of(policy)] = [port["port"] for rule in rules for port in rule.get("ports", ())]
    assert ports == {
        "demo-broker": [10911, 5557],
        "demo-controller": [9878, 5557],
        "demo-proxy": [8081, 8082, 5557],
        "demo-report": [],
        "demo-fenced": [],
    }


def test_brokers_and_proxies_connect_to_the_cluster_alone() -> None:
    own = "popmq.io/cluster"
    policies = {name_of(policy): policy["spec"] for policy in of_kind(made(SMALL), "NetworkPolicy")}
    for role in ("broker", "proxy"):
        to_brokers, to_controllers, names = policies[f"demo-{role}"]["egress"]
        assert {port["port"] for port in names["ports"]} == {53}
        for rule, port in ((to_brokers, 10911), (to_controllers, 9878)):
            assert [item["port"] for item in rule["ports"]] == [port]
            (peer,) = rule["to"]
            assert peer["podSelector"]["matchLabels"][own] == "demo"
    for role in ("controller", "report"):
        assert policies[f"demo-{role}"]["policyTypes"] == ["Ingress"]


def test_the_admin_port_is_for_the_operator_reports_and_administrators() -> None:
    console = {"podSelector": {"matchLabels": {"app": "console"}}}
    given = cluster(networkPolicy={"administrators": [console]})
    (policy,) = (
        policy
        for policy in of_kind(made(given), "NetworkPolicy")
        if name_of(policy) == "demo-proxy"
    )
    public, admin, _ = policy["spec"]["ingress"]
    assert "from" not in public
    callers = [peer["podSelector"]["matchLabels"] for peer in admin["from"]]
    assert callers[0] == {"app": "console"}
    assert callers[1] == {"app.kubernetes.io/name": "popmq-operator"}
    assert callers[2]["app.kubernetes.io/component"] == "report"
    assert len(callers) == 3


def test_two_clusters_share_no_name_and_no_selector() -> None:
    item, other = made(cluster("a")), made(cluster("a-broker"))
    keys = [{(kind_of(part), name_of(part)) for part in parts} for parts in (item, other)]
    assert not keys[0] & keys[1]
    for workload in (*of_kind(item, "StatefulSet"), *of_kind(item, "Deployment")):
        selector = workload["spec"]["selector"]["matchLabels"]
        for pod in pods_of(other):
            assert not selector.items() <= pod["metadata"]["labels"].items()


def test_selectors_find_the_pods_that_are_meant_and_no_others() -> None:
    objects = made(LARGE)
    workloads = [*of_kind(objects, "StatefulSet"), *of_kind(objects, "Deployment")]
    for workload in workloads:
        selector = workload["spec"]["selector"]["matchLabels"].items()
        found_workloads = [
            workload for workload in workloads if selector <= _pod_labels(workload).items()
        ]
        assert found_workloads == [workload]
    for service in of_kind(objects, "Service"):
        selector = service["spec"]["selector"].items()
        assert (
            len([workload for workload in workloads if selector <= _pod_labels(workload).items()])
            == 1
        )


def _pod_labels(workload: Manifest) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def test_an_autoscaled_deployment_leaves_its_replicas_to_the_autoscaler() -> None:
    assert "replicas" not in named(made(LARGE), "Deployment", "big-proxy")["spec"]
    assert named(made(SMALL), "Deployment", "demo-proxy")["spec"]["replicas"] == 2
    assert of_kind(made(SMALL), "HorizontalPodAutoscaler") == []


def _hash(objects: list[Manifest], kind: str, name: str) -> str:
    pod = named(objects, kind, name)["spec"]["template"]
    value: str = pod["metadata"]["annotations"]["popmq.io/template"]
    return value


@pytest.mark.parametrize(
    ("change", "rolled"),
    [
        ({"image": "popmq:next"}, {"broker", "proxy", "controller"}),
        ({"config": {"pop.max_batch": "8"}}, {"broker", "proxy"}),
        ({"config": {"timer.flush_ms": "500"}}, {"broker"}),
        ({"config": {"lean.ping_ms": "5000"}}, {"proxy"}),
        ({"proxies": {"replicas": 5}}, set()),
        ({"brokers": {"groups": 2}}, set()),
        ({"brokers": {"storage": {"size": "30Gi"}}}, set()),
        ({"controller": {"replicas": 1}}, {"broker", "proxy", "controller"}),
    ],
)
def test_a_change_makes_other_pods_of_those_roles_that_it_is_for(
    change: dict[str, Any], rolled: set[str]
) -> None:
    before, after = made(SMALL), made(cluster(**change))
    places = {
        "broker": ("StatefulSet", "demo-broker-0"),
        "proxy": ("Deployment", "demo-proxy"),
        "controller": ("Deployment", "demo-controller-0"),
    }
    changed = {r for r, at_ in places.items() if _hash(before, *at_) != _hash(after, *at_)}
    assert changed == rolled


def test_a_restart_annotation_makes_other_pods() -> None:
    again = cluster()
    again["metadata"]["annotations"]["popmq.io/restart"] = "monday"
    before, after = made(SMALL), made(again)
    assert _hash(before, "StatefulSet", "demo-broker-0") != _hash(
        after, "StatefulSet", "demo-broker-0"
    )


def test_all_is_owned_by_the_cluster_but_volume_claims_are_not() -> None:
    objects = made(SMALL)
    for manifest in objects:
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert owner["uid"] == "uid-of-apps-demo"
    (claim,) = named(objects, "StatefulSet", "demo-broker-0")["spec"]["volumeClaimTemplates"]
    assert "ownerReferences" not in claim["metadata"]
