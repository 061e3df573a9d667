"""Specs that cannot be are refused with the field, the value and the limit."""

from typing import Any

import pytest
from kube.clusters import cluster, read

from popmq.operator.model.quantity import parse_quantity
from popmq.operator.model.spec import SpecError
from popmq.operator.resources.config import settings


def test_an_empty_spec_is_a_whole_cluster() -> None:
    spec = read(cluster())
    assert (spec.brokers.groups, spec.brokers.replicas, spec.brokers.min_in_sync) == (1, 3, 2)
    assert (spec.proxies.replicas, spec.controllers.replicas) == (2, 2)
    assert (spec.image, spec.tls.mode, spec.policies) == ("popmq:test", "Own", True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"brokers": {"replicas": 0}}, "brokers.replicas = 0: 1 to 9"),
        ({"brokers": {"groups": 65}}, "brokers.groups = 65: 1 to 64"),
        ({"brokers": {"replicas": 2, "durability": {"minInSync": 3}}}, "minInSync = 3: 1 to"),
        ({"brokers": {"durability": {"flush": "Fsync"}}}, "with brokers.replicas = 3 it is Quorum"),
        (
            {"brokers": {"replicas": 1, "durability": {"flush": "Quorum"}}},
            "with brokers.replicas = 1 it is Fsync",
        ),
        ({"brokers": {"storage": {"size": "20 GB"}}}, "'20 GB' is not a quantity"),
        ({"brokers": {"storage": {"size": "0"}}}, "more than 0"),
        ({"brokers": {"retention": "3 days"}}, "brokers.retention: '3 days' is not a duration"),
        ({"brokers": {"retention": "5m"}}, "brokers.retention = 5m: at least 1h"),
        (
            {"proxies": {"autoscaling": {"minReplicas": 4, "maxReplicas": 3}}},
            "minReplicas = 4: at most maxReplicas = 3",
        ),
        ({"tls": {"mode": "Secret"}}, "needs tls.secretName"),
        ({"tls": {"mode": "Disabled", "plainText": False}}, "nothing would be left"),
        ({"config": {"pop.max_bach": "3"}}, "the nearest known one is pop.max_batch"),
        ({"config": {"pop.max_batch": "65"}}, "spec.config[pop.max_batch] = 65: at most 64"),
        ({"config": {"broker.name": "x"}}, "broker.name is set by the operator"),
        ({"config": {"replication.replicas": "2"}}, "is set by the operator"),
        (
            {"brokers": {"template": {"labels": {"popmq.io/cluster": "x"}}}},
            "popmq.io/cluster is the operator's own",
        ),
        (
            {"proxies": {"template": {"priorityClassName": "system-node-critical"}}},
            "template.priorityClassName = system-node-critical: that of Kubernetes' own parts",
        ),
        ({"controller": {"template": {"hostNetwork": True}}}, "template.hostNetwork: is not"),
        (
            {"brokers": {"template": {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}}},
            "template.volumes: x is hostPath: one of configMap, csi",
        ),
        (
            {"proxies": {"template": {"volumes": [{"name": "x"}]}}},
            "template.volumes: x is nothing: one of configMap",
        ),
        (
            {"proxies": {"template": {"volumes": [{"name": "users", "emptyDir": {}}]}}},
            "template.volumes: users is the operator's own",
        ),
        (
            {"console": {"template": {"env": [{"name": "POPMQ_ENDPOINT", "value": "x"}]}}},
            "template.env: POPMQ_ENDPOINT: a setting belongs into spec.config",
        ),
        ({"brokers": "none"}, "spec cannot be read"),
        ({"brokers": {"retention": "99999999d"}}, "at most 876000h"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        read(cluster(**given))
    assert message in str(refused.value)


def test_the_name_that_a_restored_cluster_had_before_may_be_said() -> None:
    values = settings(read(cluster("shop", config={"cluster.formerly": "old-shop"})))
    assert (values["cluster.name"], values["cluster.formerly"]) == ("shop", "old-shop")


def test_a_flag_that_is_neither_true_nor_false_is_refused() -> None:
    given = cluster()
    given["metadata"]["annotations"]["popmq.io/pause"] = "yes"
    with pytest.raises(SpecError, match=r"popmq\.io/pause = yes: true or false"):
        read(given)


@pytest.mark.parametrize(
    ("less", "more"),
    [("1Gi", "2Gi"), ("1G", "1Gi"), ("999Mi", "1Gi"), ("500m", "1"), ("1.5Gi", "1600Mi")],
)
def test_quantities_compare_by_what_they_mean(less: str, more: str) -> None:
    assert parse_quantity(less) < parse_quantity(more)


def test_the_same_quantity_may_be_written_in_many_ways() -> None:
    assert parse_quantity("1Ki") == parse_quantity("1024") == parse_quantity("1.024e3")
