"""Remoting clients of a BrokerCluster: their port, ports for broker groups, what routes name."""

from pathlib import Path
from typing import Any

import pytest
from kube.clusters import cluster, read
from kube.test_builders import made, named
from kube.world import World, play, running

from popmq.common.settings.settings import load_settings
from popmq.operator.model.manifest import Manifest
from popmq.operator.model.spec import SpecError
from popmq.operator.resources.config import settings, toml

GROUP_PORTS: dict[str, Any] = {"remoting": {"groupPorts": 3}, "brokers": {"groups": 2}}


def service_ports(given: Manifest) -> dict[str, int]:
    ports = named(made(given), "Service", "demo-proxy")["spec"]["ports"]
    assert [port["targetPort"] for port in ports] == [port["name"] for port in ports]
    return {port["name"]: port["port"] for port in ports}


def test_proxies_get_a_port_for_remoting_clients_where_it_is_asked_for() -> None:
    assert service_ports(cluster()) == {"grpc": 8081}
    assert service_ports(cluster(remoting={})) == {"grpc": 8081, "remoting": 9876}
    values = settings(read(cluster(remoting={})))
    assert values["remoting.listen"] == "0.0.0.0:9876"
    assert values["remoting.advertise"] == "demo-proxy.apps.svc:9876"
    assert "remoting.group_ports" not in values
    assert not [key for key in settings(read(cluster())) if key.startswith("remoting.")]


def test_each_broker_group_has_a_port_also_before_it_exists() -> None:
    given = cluster(**GROUP_PORTS)
    ports = service_ports(given)
    assert list(ports.items())[2:] == [
        ("remoting-0", 9900),
        ("remoting-1", 9901),
        ("remoting-2", 9902),
    ]
    pod = named(made(given), "Deployment", "demo-proxy")["spec"]["template"]["spec"]
    opened = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert opened == {**ports, "admin": 8082, "http": 5557}


def test_the_proxies_read_these_settings(tmp_path: Path) -> None:
    path = tmp_path / "popmq.toml"
    path.write_text(toml(settings(read(cluster(**GROUP_PORTS)))), encoding="utf-8")
    remoting = load_settings(str(path), {}, {}).settings.remoting
    assert remoting.ports_of_groups() == {"broker-0": 9900, "broker-1": 9901, "broker-2": 9902}


def test_those_who_may_call_the_proxies_may_call_these_ports_too() -> None:
    callers = [{"podSelector": {"matchLabels": {"app": "shop"}}}]
    given = cluster(networkPolicy={"clients": callers}, **GROUP_PORTS)
    public, *_ = named(made(given), "NetworkPolicy", "demo-proxy")["spec"]["ingress"]
    assert [port["port"] for port in public["ports"]] == [8081, 9876, 9900, 9901, 9902]
    assert public["from"][0] == callers[0]


@pytest.mark.parametrize(("plain_text", "tls"), [(True, "auto"), (False, "only")])
def test_these_ports_take_tls_as_the_public_port_does(plain_text: bool, tls: str) -> None:
    values = settings(read(cluster(remoting={}, tls={"plainText": plain_text})))
    assert (values["proxy.tls"], values["listen.open_to_anybody"]) == (tls, str(plain_text).lower())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"remoting": {"groupPorts": 1}, "brokers": {"groups": 2}},
            "remoting.groupPorts = 1: 0, or at least brokers.groups = 2",
        ),
        ({"remoting": {"groupPorts": 65}}, "remoting.groupPorts = 65: 0 to 64"),
        (
            {"remoting": {}, "config": {"remoting.advertise": "a:1"}},
            "config: remoting.advertise is set by the operator from spec.remoting",
        ),
    ],
)
def test_what_remoting_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        read(cluster(**given))
    assert message in str(refused.value)


def test_an_address_that_clients_cannot_dial_is_refused_by_its_field() -> None:
    with pytest.raises(SpecError, match=r"spec\.remoting\.advertise"):
        settings(read(cluster(remoting={"advertise": "queue.example"})))


@pytest.mark.more
def test_proxies_alone_restart_and_the_ports_go_with_the_field() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.restarted.clear()
        world.change(remoting={"advertise": "queue.example:9876"})
        await world.run()
        assert {name.rpartition("-pod-")[0] for name in world.restarted} == {"demo-proxy"}
        assert world.status()["proxies"]["remoting"] == "demo-proxy.apps.svc:9876"
        config = world.api.get("configmaps", "apps", "demo-config")
        assert config is not None
        assert 'advertise = "queue.example:9876"' in config["data"]["popmq.toml"]
        world.change(remoting=None)
        await world.run()
        service = world.api.get("services", "apps", "demo-proxy")
        assert service is not None
        assert [port["name"] for port in service["spec"]["ports"]] == ["grpc"]
        assert "remoting" not in world.status()["proxies"]

    play(story)
