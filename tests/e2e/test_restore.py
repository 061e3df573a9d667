"""A backup as docs/how-to/back-up.md has it: one broker's disk, copied while the group works.

The copy is what a power cut leaves.  It becomes a broker of its own in a cluster that has never
heard of the others, with every message that was answered OK before; then two empty ones copy it.
"""

import asyncio
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from e2e.processes import Role
from e2e.replicated import GroupClient, ReplicatedGroup, agree, put

from popmq.common.protocol.messaging_payloads import Kind

TOPIC = "orders"
MESSAGES = 300

pytestmark = pytest.mark.heavy


@pytest.mark.timeout(300)
def test_a_copy_of_one_brokers_disk_becomes_a_group_again(tmp_path: Path) -> None:
    sent = _backed_up(tmp_path / "before", tmp_path / "copy")
    assert len(sent) == MESSAGES
    folder = tmp_path / "after"
    folder.mkdir()
    alone = ReplicatedGroup(folder, replicas=1, proxies=1)
    shutil.copytree(tmp_path / "copy", alone.data(alone.brokers[0]))
    with alone:
        assert _received(alone, "first") == sent
    with ReplicatedGroup(folder, replicas=3, proxies=1) as three:
        asyncio.run(_agreed(three))
        assert _received(three, "second") == sent


def _backed_up(folder: Path, copy: Path) -> set[str]:
    """What was answered OK before the copy was taken, of a slave that works on."""
    folder.mkdir()
    with ReplicatedGroup(folder, proxies=1) as group:
        slave = asyncio.run(_slave(group))
        group.popmq("topic", "create", TOPIC)
        sent = set(group.popmq("send", TOPIC, "body", "--count", str(MESSAGES)).splitlines())
        asyncio.run(_copied_while_messages_flow(group, slave, copy))
        return {line.split()[0] for line in sent}


async def _slave(group: ReplicatedGroup) -> Role:
    async with GroupClient(group.address) as client:
        state = await client.in_sync(3)
        master = group.master(state)
        return next(broker for broker in group.brokers if broker is not master)


async def _copied_while_messages_flow(group: ReplicatedGroup, slave: Role, copy: Path) -> None:
    async with GroupClient(group.address) as client:
        flow = asyncio.create_task(_flow(client))
        # At one instant, as the snapshot of a volume is: the broker stands still meanwhile.
        os.kill(slave.pid, signal.SIGSTOP)
        try:
            ignored = shutil.ignore_patterns("*.sock", "lock")
            await asyncio.to_thread(shutil.copytree, group.data(slave), copy, ignore=ignored)
        finally:
            os.kill(slave.pid, signal.SIGCONT)
        flow.cancel()
        await asyncio.gather(flow, return_exceptions=True)


async def _flow(client: GroupClient) -> None:
    while True:
        await client.ask(Kind.PUT, put("later", b"x"))


async def _agreed(group: ReplicatedGroup) -> None:
    async with GroupClient(group.address) as client:
        await agree(group, client)


def _received(group: ReplicatedGroup, readers: str) -> set[str]:
    group.popmq("group", "create", readers)
    expected = str(MESSAGES)
    output = group.popmq("recv", TOPIC, "--group", readers, "--count", expected, "--wait", "5s")
    return set(re.findall(r"id=([0-9A-F]+)", output))
