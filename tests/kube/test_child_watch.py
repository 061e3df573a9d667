"""What clusters own, watched by the label of the operator, with a small API server."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from kube.access import token_access
from kube.fake_api import FakeApi, Object

from popmq.operator.kube import child_watch
from popmq.operator.kube.api_client import ApiClient
from popmq.operator.kube.child_watch import ChildWatch, child_watches
from popmq.operator.model.manifest import CONFIG_MAP

Story = Callable[[FakeApi, "Woken"], Awaitable[None]]


class Woken:
    """The clusters that were woken, in order."""

    def __init__(self) -> None:
        self.clusters: list[str] = []
        self._moved = asyncio.Event()

    def __call__(self, namespace: str, name: str) -> None:
        self.clusters.append(f"{namespace}/{name}")
        self._moved.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.clusters) < count:
                self._moved.clear()
                await self._moved.wait()


def play(story: Story, *, namespace: str = "") -> None:
    async def whole() -> None:
        fake, woken = FakeApi(), Woken()
        await fake.start()
        client = ApiClient(token_access(fake.url), timeout_s=30.0)
        watch = ChildWatch(client, CONFIG_MAP, namespace, woken)
        task = asyncio.get_running_loop().create_task(watch.run())
        try:
            await story(fake, woken)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.close()
            await fake.stop()

    asyncio.run(whole())


def config_map(name: str, cluster: str, *, ours: bool = True, namespace: str = "apps") -> Object:
    labels = {"popmq.io/cluster": cluster}
    if ours:
        labels["app.kubernetes.io/managed-by"] = "popmq-operator"
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "b"}}


def test_objects_with_the_operators_label_wake_their_cluster_and_no_others() -> None:
    async def story(fake: FakeApi, woken: Woken) -> None:
        fake.put("configmaps", config_map("there", "demo"))
        fake.put("configmaps", config_map("foreign", "other", ours=False))
        await woken.until(1)
        fake.put("configmaps", config_map("foreign-too", "other", ours=False))
        fake.put("configmaps", config_map("later", "shop", namespace="else"))
        await woken.until(2)
        fake.remove("configmaps", "apps", "there")
        await woken.until(3)
        assert woken.clusters == ["apps/demo", "else/shop", "apps/demo"]

    play(story)


def test_a_watch_whose_version_is_gone_or_that_fails_starts_again_with_a_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child_watch, "PAUSE_S", 0.01)

    async def story(fake: FakeApi, woken: Woken) -> None:
        failing = ["error", "drop", "error"]
        fake.fault = lambda asked: failing.pop() if failing else ""
        fake.put("configmaps", config_map("there", "demo"))
        await woken.until(1)
        fake.compact()
        fake.put("configmaps", config_map("later", "shop"))
        await woken.until(2)
        assert "apps/shop" in woken.clusters
        assert not failing

    play(story)


def test_without_a_namespace_one_watch_of_each_kind_is_for_all() -> None:
    client = ApiClient(token_access("http://127.0.0.1:1"))
    woken = Woken()
    assert len(child_watches(client, (), woken)) == len(child_watch.WATCHED)
    assert len(child_watches(client, ("a", "b"), woken)) == 2 * len(child_watch.WATCHED)
