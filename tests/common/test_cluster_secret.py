"""What two processes have to prove to each other before a request is served."""

import asyncio
import os
from pathlib import Path

import pytest
from common.frame_peers import (
    BROKER,
    LONG_MS,
    PROXY,
    SECONDS,
    Handler,
    RawPeer,
    asking,
    frame,
    raw_peer,
    serving,
)

from popmq.common.errors import Code, ConfigError, PopmqError
from popmq.common.protocol.cluster_secret import (
    ClusterSecret,
    load_cluster_secret,
    make_cluster_secret,
)
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frame_server import KINDS_OF_ROLE, FrameServer
from popmq.common.protocol.frames import FrameSettings, Hello, ProcessRole, encode_hello
from popmq.common.protocol.messaging_payloads import Kind

OURS = ClusterSecret((b"a" * 32,))
OTHER = ClusterSecret((b"b" * 32,))
STRICT = FrameSettings(secret=OURS)
MIXED = FrameSettings(secret=OURS, secret_required=False)
WITHOUT = FrameSettings(secret_required=False)
CHALLENGE = "0123456789abcdef"


async def refusal(address: str, settings: FrameSettings) -> str:
    """Why a port with these settings gets no connection: it stays refused."""
    async with asyncio.timeout(SECONDS), asking(address, settings=settings) as port:
        with pytest.raises(PopmqError) as refused:
            await call(port, Kind.PUT, b"x", LONG_MS)
        assert refused.value.code is Code.HA_NOT_AVAILABLE
        return str(refused.value)


@pytest.mark.parametrize(
    ("server", "asker"),
    [
        (STRICT, STRICT),
        (MIXED, STRICT),
        (MIXED, MIXED),
        (MIXED, WITHOUT),
        (WITHOUT, MIXED),
        (WITHOUT, WITHOUT),
        (FrameSettings(secret=ClusterSecret((b"n" * 32, b"a" * 32))), STRICT),
    ],
)
async def test_peers_that_may_connect_are_served(
    server: FrameSettings, asker: FrameSettings
) -> None:
    if server.secret is not None and len(server.secret.secrets) == 2:
        asker = FrameSettings(secret=ClusterSecret((b"a" * 32, b"n" * 32)))  # mid-rotation
    async with (
        asyncio.timeout(SECONDS),
        serving(Handler(), settings=server) as address,
        asking(address, settings=asker) as port,
    ):
        assert await call(port, Kind.PUT, b"x", LONG_MS) == b"x"


@pytest.mark.parametrize(
    ("server", "asker", "why"),
    [
        (STRICT, WITHOUT, "proxy p0 offers no proof of the cluster's secret"),
        (WITHOUT, STRICT, "broker b0 offers no proof of the cluster's secret"),
        (STRICT, FrameSettings(secret=OTHER), "broker b0 holds another cluster secret than proxy"),
        (MIXED, FrameSettings(secret=OTHER), "broker b0 holds another cluster secret than proxy"),
    ],
)
async def test_peers_without_the_same_secret_are_refused_at_either_end(
    server: FrameSettings, asker: FrameSettings, why: str
) -> None:
    handler = Handler()
    async with serving(handler, settings=server) as address:
        assert why in await refusal(address, asker)
    assert handler.asked.empty()


async def greet_with_challenge(peer: RawPeer, hello: Hello = PROXY) -> tuple[bytes, bytes, bytes]:
    """Our HELLO, the server's HELLO, its proof."""
    own = encode_hello(hello)[:-1].replace(b'"challenge":""', f'"challenge":"{CHALLENGE}"'.encode())
    own += b"}"
    peer.writer.write(frame(Kind.HELLO, 0, own))
    kind, _, server_hello = await peer.read()
    assert kind == Kind.HELLO
    kind, _, proof = await peer.read()
    assert kind == Kind.PROOF
    return own, server_hello, proof


async def test_the_proof_is_bound_to_both_hellos_and_to_the_side() -> None:
    """What a server proved cannot be sent back to it, and a proof of before is worth nothing."""
    handler = Handler()
    async with asyncio.timeout(SECONDS), serving(handler, settings=STRICT) as address:
        async with raw_peer(address) as peer:
            own, server_hello, proof = await greet_with_challenge(peer)
            assert OURS.proves(proof, "server", own, server_hello)
            good = OURS.proof("asker", own, server_hello)
            peer.writer.write(frame(Kind.PROOF, 0, good))
            peer.writer.write(frame(Kind.PUT, 7, b"x", timeout_ms=LONG_MS))
            assert await peer.read() == (Kind.REPLY, 7, b"x")
        for again in (good, proof, b"", bytes(32)):
            async with raw_peer(address) as peer:
                await greet_with_challenge(peer)
                peer.writer.write(frame(Kind.PROOF, 0, again))
                peer.writer.write(frame(Kind.PUT, 8, b"y", timeout_ms=LONG_MS))
                code, text = await peer.read_refusal()
                assert code is Code.FORBIDDEN
                assert "another cluster secret" in text
    assert handler.asked.qsize() == 1


async def test_a_request_before_the_proof_closes_the_connection() -> None:
    handler = Handler()
    server = FrameServer(handler, BROKER, settings=STRICT)
    address = await server.listen("127.0.0.1:0")
    async with asyncio.timeout(SECONDS), raw_peer(address) as peer:
        await greet_with_challenge(peer)
        peer.writer.write(frame(Kind.FETCH, 1, b"", timeout_ms=LONG_MS))
        code, text = await peer.read_refusal()
        assert (code, "before the proof" in text) == (Code.FORBIDDEN, True)
    assert server.forbidden == 1
    await server.stop()
    assert handler.asked.empty()


async def test_a_peer_that_never_proves_is_closed_in_the_time_of_a_hello() -> None:
    settings = FrameSettings(secret=OURS, connect_timeout_ms=50)
    async with (
        asyncio.timeout(SECONDS),
        serving(Handler(), settings=settings) as address,
        raw_peer(address) as peer,
    ):
        await greet_with_challenge(peer)
        code, _ = await peer.read_refusal()
        assert code is Code.REQUEST_TIMEOUT


async def test_every_request_is_refused_to_each_role_that_may_not_send_it() -> None:
    """Kind x role: what the table does not allow is refused, counted, and never handled."""
    requests = [kind for kind in Kind if kind >= 16]
    for role in ProcessRole:
        handler = Handler(*requests)
        server = FrameServer(handler, BROKER)
        address = await server.listen("127.0.0.1:0")
        hello = Hello(role=role, name="x", cluster="blue")
        async with asyncio.timeout(SECONDS), raw_peer(address) as peer:
            await peer.greet(hello)
            for number, kind in enumerate(requests, 1):
                peer.writer.write(frame(kind, number, b"", timeout_ms=LONG_MS))
            wrong = [kind for kind in requests if kind not in KINDS_OF_ROLE[role]]
            for kind in wrong:
                answer, number, body = await peer.read()
                assert (answer, requests[number - 1]) == (Kind.ERROR, kind)
                assert int.from_bytes(body[:4], "big") == Code.FORBIDDEN
                assert f"a {role} may not send {kind.name}" in body[4:].decode()
        assert handler.asked.qsize() == len(requests) - len(wrong)
        assert server.forbidden == len(wrong)
        await server.stop()


def test_no_two_roles_but_tools_and_proxies_may_send_the_same_request_of_replication() -> None:
    for kind in (Kind.FETCH, Kind.ACKED, Kind.HANDSHAKE, Kind.REGISTER, Kind.ALTER_SYNC_STATE_SET):
        roles = [role for role, kinds in KINDS_OF_ROLE.items() if kind in kinds]
        assert roles == [ProcessRole.BROKER]


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
async def test_a_port_of_the_network_needs_a_secret_or_the_word_that_none_is_needed(
    address: str,
) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.secret_file"):
        await FrameServer(Handler(), BROKER).listen(address)
    for settings in (STRICT, WITHOUT):
        server = FrameServer(Handler(), BROKER, settings=settings)
        assert await server.listen("0.0.0.0:0")
        await server.stop()


def test_a_secret_that_was_made_is_read_again_and_never_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    make_cluster_secret(str(path))
    first = load_cluster_secret(str(path))
    make_cluster_secret(str(path))
    assert load_cluster_secret(str(path)) == first
    assert path.stat().st_mode & 0o777 == 0o600
    assert first.secrets[0].decode() not in repr(first) + repr(FrameSettings(secret=first))


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("a" * 32, 0o604, r"every user may open it \(mode 0604\)"),
        ("", 0o600, "0 secrets: 1 to 4"),
        ("a" * 31, 0o600, "line 1 has 31 bytes: at least 32"),
        ("\n".join("abcde"[n] * 32 for n in range(5)), 0o600, "5 secrets: 1 to 4"),
        ("a" * 5_000, 0o600, "longer than 4096 bytes"),
        ("a" * 16 + " " + "b" * 16, 0o600, "printable"),
    ],
)
def test_a_file_that_holds_no_good_secret_is_refused_with_its_name(
    tmp_path: Path, text: str, mode: int, why: str
) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match=why) as refused:
        load_cluster_secret(str(path))
    assert f"cluster.secret_file = {path}" in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_cluster_secret(str(tmp_path / "none"))


async def test_a_port_whose_secret_is_mended_connects() -> None:
    """A broker that starts with the wrong file is not lost for ever for who asks it."""
    handler = Handler()
    server = FrameServer(handler, BROKER, settings=FrameSettings(secret=OTHER))
    address = await server.listen("127.0.0.1:0")
    states: asyncio.Queue[bool] = asyncio.Queue()
    port = FramePort(address, PROXY, settings=STRICT, on_state=states.put_nowait)
    port.start()
    async with asyncio.timeout(SECONDS):
        with pytest.raises(PopmqError, match="another cluster secret"):
            await call(port, Kind.PUT, b"x", LONG_MS)
        server.settings = STRICT
        assert await states.get()
        assert await call(port, Kind.PUT, b"x", LONG_MS) == b"x"
    await port.close()
    await server.stop()
