"""A cluster gets a secret, another one, and TLS: role by role, under load, with nothing lost.

It begins with the product of an earlier commit, before processes had a secret or before a broker
named its group, or with today's.  In each stage every process is restarted once; the processes of
two neighbouring stages always talk to each other.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from common.authority import Authority
from e2e.earlier import earlier_tree, run_earlier
from e2e.replicated import GroupClient, ReplicatedGroup
from e2e.test_rolling_upgrade import BUFFERED, DURABLE, TOPIC, Load, upgrade

from popmq.common.errors import PopmqError
from popmq.common.protocol.cluster_secret import new_secret_text, parse_cluster_secret
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frame_tls import FrameTls
from popmq.common.protocol.frames import FrameSettings, Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind

# The last commit whose processes have no secret.
BEFORE_SECRETS = "0e466b4"
# The last commit whose brokers do not name their group in HELLO.
BEFORE_GROUPS = "f8265f1"
FILE, REQUIRED = "POPMQ_CLUSTER_SECRET_FILE", "POPMQ_CLUSTER_SECRET_REQUIRED"
TLS_REQUIRED = "POPMQ_CLUSTER_TLS_REQUIRED"

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(420)]


@dataclass(frozen=True)
class Stage:
    """What every process has after it. `secrets` is the content of the file; `settings` of None are
    removed."""

    secrets: Sequence[str] = ()
    settings: dict[str, str | None] = field(default_factory=dict)


OLD, NEW = new_secret_text().strip(), new_secret_text().strip()
WITH_SECRET = Stage([OLD], {FILE: "secret"})
ROLLS: dict[str, tuple[str, Stage, list[Stage]]] = {
    "from no secret to one, and to TLS": (
        BEFORE_SECRETS,
        Stage(),
        [
            Stage([OLD], {FILE: "secret", REQUIRED: "false"}),
            Stage([OLD], {REQUIRED: None, "tls": "given", TLS_REQUIRED: "false"}),
            Stage([OLD], {TLS_REQUIRED: None}),
        ],
    ),
    "from the commit before, with a secret": (BEFORE_GROUPS, WITH_SECRET, [WITH_SECRET]),
    "from one secret to another": (
        "",
        WITH_SECRET,
        [Stage([OLD, NEW]), Stage([NEW, OLD]), Stage([NEW])],
    ),
}


@pytest.mark.parametrize("name", ROLLS)
def test_nothing_acknowledged_is_lost_while_authentication_is_rolled(
    name: str, tmp_path: Path
) -> None:
    commit, first, stages = ROLLS[name]
    ca = Authority(tmp_path / "ca")
    rolled = Rolled(ReplicatedGroup(tmp_path, proxies=2), tmp_path / "secret", ca)
    group = rolled.group
    if commit:
        tree = earlier_tree(commit, tmp_path / "earlier")
        run_earlier(tree, group.controller, *group.brokers, *group.proxies)
    rolled.set(first)
    with group:
        for proxy in group.proxies:
            proxy.settings["POPMQ_PROXY_LISTEN"] = proxy.ready.endpoint
        group.popmq("topic", "create", TOPIC)
        group.popmq("group", "create", DURABLE)
        group.popmq("group", "create", BUFFERED, "--check-points", "buffered")
        load = Load(group.endpoints, random.Random(1))
        asyncio.run(rolled.drive(load, stages))
        for text in rolled.refusals:
            print(f"a peer of before: {text}")
    reports = {consumers: load.report(consumers) for consumers in (DURABLE, BUFFERED)}
    for consumers, report in reports.items():
        print(f"\n{name}: group {consumers}\n{report.table()}")
    assert len(load.sent_ok) > 100 * len(stages)
    assert reports[DURABLE].faults == []
    # A message of a buffered group may come back early after its master has stopped.
    assert reports[BUFFERED].lost == 0
    assert reports[BUFFERED].acked_seen_again == 0


@dataclass
class Rolled:
    group: ReplicatedGroup
    secret_file: Path
    ca: Authority
    refusals: list[str] = field(default_factory=list)

    def set(self, stage: Stage) -> None:
        """For the next start of every process."""
        if stage.secrets:
            self.secret_file.touch(mode=0o600)
            self.secret_file.write_text("\n".join(stage.secrets))
        for role in (self.group.controller, *self.group.brokers, *self.group.proxies):
            for key, value in stage.settings.items():
                if value is None:
                    role.settings.pop(key)
                elif key == "tls":
                    certificate, private_key = self.ca.sign(role.name)
                    role.settings["POPMQ_CLUSTER_TLS_CERTIFICATE"] = certificate
                    role.settings["POPMQ_CLUSTER_TLS_KEY"] = private_key
                    role.settings["POPMQ_CLUSTER_TLS_AUTHORITY"] = str(self.ca.certificate)
                else:
                    role.settings[key] = str(self.secret_file) if value == "secret" else value

    async def drive(self, load: Load, stages: list[Stage]) -> None:
        async with load:
            for stage in stages:
                self.set(stage)
                await self._roll(self._client_of(stage))
            await self._refuses_peers_of_before(stages[-1])
            await load.drain()

    def _client_of(self, stage: Stage) -> GroupClient:
        """One that every process of this stage and of the one before serves."""
        secret = parse_cluster_secret("\n".join(stage.secrets).encode(), "the test")
        tls = FrameTls(
            *self.ca.sign("client"), str(self.ca.certificate), name="popmq", required=False
        )
        frames = FrameSettings(secret=secret, secret_required=False, tls=tls)
        return GroupClient(self.group.address, frames)

    async def _roll(self, client: GroupClient) -> None:
        """Slaves, proxies and controller, then the master, which hands over."""
        group = self.group
        async with client:
            master = group.master(await client.in_sync(3))
            slaves = [broker for broker in group.brokers if broker is not master]
            for role in (slaves[0], slaves[1], group.proxies[0], group.controller, master):
                await upgrade(role, {})
                await client.in_sync(3, within_s=60)
            await upgrade(group.proxies[1], {})

    async def _refuses_peers_of_before(self, last: Stage) -> None:
        """Those without a secret, with the first one alone, or in plain text."""
        secret = parse_cluster_secret(last.secrets[0].encode(), "the test")
        refused = [FrameSettings(secret=None, secret_required=False)]
        if last.secrets == [NEW]:
            refused.append(FrameSettings(secret=parse_cluster_secret(OLD.encode(), "the test")))
        if "POPMQ_CLUSTER_TLS_CERTIFICATE" in self.group.controller.settings:
            refused.append(FrameSettings(secret=secret))
        hello = Hello(role=ProcessRole.TOOL, name="of before", cluster="popmq")
        addresses = [broker.settings["POPMQ_BROKER_LISTEN"] for broker in self.group.brokers]
        for address in (self.group.address, *addresses):
            for settings in refused:
                port = FramePort(address, hello, settings=settings)
                port.start()
                with pytest.raises(PopmqError) as error:
                    await call(port, Kind.LIST_REPLICAS, b"", 5_000)
                assert port.peer is None
                self.refusals.append(str(error.value))
                await port.close()
