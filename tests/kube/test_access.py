"""Kubeconfigs with each kind of credentials, against a small API server."""

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kube.control_plane import ROOT
from kube.fake_api import FakeApi

from popmq.common.errors import ConfigError
from popmq.operator.kube import access
from popmq.operator.kube.access import find_access
from popmq.operator.kube.api_client import ApiClient
from popmq.operator.model.manifest import TOPIC

Story = Callable[[FakeApi], Awaitable[None]]


def play(story: Story) -> None:
    async def whole() -> None:
        api = FakeApi()
        await api.start()
        try:
            await story(api)
        finally:
            await api.stop()

    asyncio.run(whole())


def kubeconfig(folder: Path, server: str, user: dict[str, Any], **cluster: Any) -> str:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "apps"}}],
        "current-context": "x",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return str(path)


def plugin(folder: Path, body: str) -> dict[str, Any]:
    script = folder / "plugin.py"
    script.write_text(f"import json\n{body}\n")
    version = "client.authentication.k8s.io/v1"
    command = {"apiVersion": version, "command": sys.executable, "args": [str(script)]}
    return {"exec": {**command, "interactiveMode": "Never"}}


def credential(token: str) -> str:
    version = "client.authentication.k8s.io/v1"
    answer = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": token}}
    return f"print(json.dumps({answer!r}))"


async def asks(path: str) -> None:
    client = ApiClient(await find_access(path))
    try:
        await client.list(TOPIC, "apps")
    finally:
        await client.close()


def test_an_exec_plugin_gives_the_token(tmp_path: Path) -> None:
    async def story(api: FakeApi) -> None:
        await asks(kubeconfig(tmp_path, api.url, plugin(tmp_path, credential("of-the-plugin"))))
        assert [asked.user for asked in api.asked] == ["of-the-plugin"]

    play(story)


@pytest.mark.parametrize("body", ["raise SystemExit(1)", "print('no JSON')"])
def test_an_exec_plugin_that_fails_is_an_error_and_no_anonymous_operator(
    tmp_path: Path, body: str
) -> None:
    async def story(api: FakeApi) -> None:
        path = kubeconfig(tmp_path, api.url, plugin(tmp_path, body))
        with pytest.raises(ConfigError, match=r"operator\.kubeconfig = .* gave no credentials"):
            await find_access(path)

    play(story)


def test_a_token_file_that_changes_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "RENEW_S", 0.0)

    async def story(api: FakeApi) -> None:
        token = tmp_path / "token"
        token.write_text("first\n")
        path = kubeconfig(tmp_path, api.url, {"tokenFile": str(token)})
        client = ApiClient(await find_access(path))
        try:
            await client.list(TOPIC, "apps")
            token.write_text("second\n")
            await client.list(TOPIC, "apps")
        finally:
            await client.close()
        assert [asked.user for asked in api.asked] == ["first", "second"]

    play(story)


def test_a_proxy_of_the_kubeconfig_gets_the_requests(tmp_path: Path) -> None:
    async def story(api: FakeApi) -> None:
        seen: list[str] = []

        async def forward(request: web.Request) -> web.Response:
            seen.append(str(request.url))
            return web.json_response({"items": []})

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        proxy = f"http://127.0.0.1:{runner.addresses[0][1]}"
        server = "http://api.example:80"
        try:
            await asks(kubeconfig(tmp_path, server, {"token": "t"}, **{"proxy-url": proxy}))
        finally:
            await runner.cleanup()
        (url,) = seen
        assert url.startswith("http://api.example")

    play(story)


@pytest.mark.parametrize("text", ["", "no: config", "{", "contexts: []"])
def test_a_kubeconfig_that_cannot_be_used_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"operator\.kubeconfig = .* cannot be used"):
        asyncio.run(find_access(str(path)))


def test_outside_of_a_pod_a_kubeconfig_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=r"operator\.kubeconfig"):
        asyncio.run(find_access(""))


def test_the_operator_and_the_controller_have_no_http_client_of_their_own() -> None:
    own = re.compile(r"^\s*(?:import|from) (http\.client|aiohttp|urllib3|httpx|requests)\b", re.M)
    paths = [path for room in ("operator", "controller") for path in (ROOT / room).rglob("*.py")]
    assert len(paths) > 30
    assert [path for path in paths if own.search(path.read_text(encoding="utf-8"))] == []
