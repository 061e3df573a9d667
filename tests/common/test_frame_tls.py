"""Frames over TLS: both ends show a certificate of the cluster's CA, or they do not talk."""

import asyncio
import shutil
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from common.authority import Authority
from common.frame_peers import BROKER, LONG_MS, PROXY, SECONDS, Handler, asking, raw_peer, serving

from popmq.common.errors import Code, ConfigError, PopmqError
from popmq.common.protocol.cluster_secret import ClusterSecret
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frame_server import FrameServer
from popmq.common.protocol.frame_tls import FrameTls
from popmq.common.protocol.frames import FrameSettings
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import load_settings

SECRET = ClusterSecret((b"a" * 32,))
PLAIN = FrameSettings(secret=SECRET)
LARGE = b"x" * (5 << 20)  # many TLS records


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "other")


def over_tls(
    pair: tuple[str, str], trusted: Authority, *, required: bool = True, name: str = "popmq"
) -> FrameSettings:
    tls = FrameTls(*pair, str(trusted.certificate), name=name, required=required)
    return FrameSettings(secret=SECRET, tls=tls)


async def answer(server: FrameSettings, asker: FrameSettings, body: bytes = b"x") -> bytes:
    async with (
        asyncio.timeout(SECONDS),
        serving(Handler(), settings=server) as address,
        asking(address, settings=asker) as port,
    ):
        return await call(port, Kind.PUT, body, LONG_MS)


async def refusal(server: FrameSettings, asker: FrameSettings, *, counted: bool = True) -> str:
    """Why the asker gets no connection; the server counts it, and no request is handled."""
    handler = Handler()
    frames = FrameServer(handler, BROKER, settings=server)
    address = await frames.listen("127.0.0.1:0")
    async with asyncio.timeout(SECONDS), asking(address, settings=asker) as port:
        with pytest.raises(PopmqError) as refused:
            await call(port, Kind.PUT, b"x", LONG_MS)
    await frames.stop()
    assert refused.value.code is Code.HA_NOT_AVAILABLE
    assert handler.asked.empty()
    assert frames.forbidden == counted
    return str(refused.value)


async def test_requests_and_answers_of_any_size_go_over_tls(ca: Authority) -> None:
    settings = over_tls(ca.sign("a"), ca)
    assert await answer(settings, settings) == b"x"
    assert await answer(settings, settings, LARGE) == LARGE


async def test_an_eavesdropper_reads_neither_bodies_nor_names(ca: Authority) -> None:
    settings = over_tls(ca.sign("a"), ca)
    seen = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = where.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                seen.extend(data)
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    async with asyncio.timeout(SECONDS), serving(Handler(), settings=settings) as where:
        listener = await asyncio.start_server(relay, "127.0.0.1", 0)
        number = listener.sockets[0].getsockname()[1]
        async with asking(f"127.0.0.1:{number}", settings=settings) as port:
            assert await call(port, Kind.PUT, b"a secret body", LONG_MS) == b"a secret body"
        listener.close()
        await listener.wait_closed()
    assert seen[:2] == b"\x16\x03"
    for text in (b"a secret body", b"challenge", PROXY.name.encode(), BROKER.cluster.encode()):
        assert text not in seen


async def test_a_peer_whose_certificate_another_ca_signed_is_refused_at_either_end(
    ca: Authority, other_ca: Authority
) -> None:
    ours = over_tls(ca.sign("a"), ca)
    foreign = other_ca.sign("b")
    trusts_both = over_tls(foreign, ca)
    text = await refusal(ours, trusts_both)  # the server refuses
    assert "TLS failed" in text
    assert "UNKNOWN_CA" in text
    text = await refusal(over_tls(foreign, ca), ours)  # the asker refuses
    assert "TLS failed: unable to get local issuer certificate" in text


async def test_a_peer_without_a_certificate_is_refused(ca: Authority) -> None:
    handler = Handler()
    frames = FrameServer(handler, BROKER, settings=over_tls(ca.sign("a"), ca))
    host, _, number = (await frames.listen("127.0.0.1:0")).rpartition(":")
    context = ssl.create_default_context(cafile=str(ca.certificate))
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection(
            host, int(number), ssl=context, server_hostname="popmq"
        )
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            await reader.read()
        writer.transport.abort()
    await frames.stop()
    assert (frames.forbidden, handler.asked.qsize()) == (1, 0)


async def test_a_certificate_that_ended_is_refused_at_either_end(ca: Authority) -> None:
    good, ended = over_tls(ca.sign("a"), ca), over_tls(ca.sign("ended", days=-1), ca)
    assert "CERTIFICATE_EXPIRED" in await refusal(good, ended)
    assert "TLS failed: certificate has expired" in await refusal(ended, good)


async def test_a_certificate_for_another_name_is_refused_at_either_end(ca: Authority) -> None:
    """As that of another service whose certificate the same CA signed."""
    good, other = over_tls(ca.sign("a"), ca), over_tls(ca.sign("b", "shop.example"), ca)
    text = await refusal(good, other)
    assert "names shop.example, not popmq (cluster.tls_name)" in text
    assert "Hostname mismatch" in await refusal(other, good)
    named = over_tls(ca.sign("c", "mq.Example"), ca, name="mq.example")
    assert await answer(named, named) == b"x"


async def test_a_certificate_for_servers_alone_does_not_ask(ca: Authority) -> None:
    """As that which a proxy shows to clients."""
    good, serving_only = over_tls(ca.sign("a"), ca), over_tls(ca.sign("b", client=False), ca)
    assert "TLS failed" in await refusal(good, serving_only)


async def test_plain_text_is_refused_where_tls_is_required_and_the_reason_is_told(
    ca: Authority,
) -> None:
    settings = over_tls(ca.sign("a"), ca)
    assert "the peer does not use TLS" in await refusal(settings, PLAIN)
    assert "cluster.tls_required = false" in await refusal(settings, PLAIN)
    assert "TLS failed: WRONG_VERSION_NUMBER" in await refusal(PLAIN, settings)


@pytest.mark.parametrize("strict_end", ["server", "asker"])
async def test_the_secret_is_proved_within_tls(ca: Authority, strict_end: str) -> None:
    settings = over_tls(ca.sign("a"), ca)
    other = replace(settings, secret=ClusterSecret((b"b" * 32,)))
    ends = (settings, other) if strict_end == "server" else (other, settings)
    # The server proves first, so it is the asker that refuses.
    assert "another cluster secret" in await refusal(*ends, counted=False)


async def test_a_cluster_is_moved_to_tls_in_two_rolls_without_a_pair_that_cannot_talk(
    ca: Authority,
) -> None:
    """First every process gets a certificate and accepts both, then every process requires TLS."""
    pair = ca.sign("a")
    both, strict = over_tls(pair, ca, required=False), over_tls(pair, ca)
    for before, after in ((PLAIN, both), (both, both), (both, strict), (strict, strict)):
        assert await answer(before, after) == b"x"
        assert await answer(after, before) == b"x"


async def test_a_port_that_fell_back_uses_tls_once_its_peer_has_it(ca: Authority) -> None:
    both = over_tls(ca.sign("a"), ca, required=False)
    server = FrameServer(Handler(), BROKER, settings=PLAIN)
    address = await server.listen("127.0.0.1:0")
    states: asyncio.Queue[bool] = asyncio.Queue()
    port = FramePort(address, PROXY, settings=both, on_state=states.put_nowait)
    port.start()
    async with asyncio.timeout(SECONDS):
        assert await call(port, Kind.PUT, b"plain", LONG_MS) == b"plain"
        server.settings = over_tls(ca.sign("b"), ca)
        for connection in list(server.connections):
            connection.close("the test ends it")
        assert [await states.get() for _ in range(3)] == [True, False, True]
        assert await call(port, Kind.PUT, b"sealed", LONG_MS) == b"sealed"
    await port.close()
    await server.stop()


async def test_a_port_that_accepts_both_never_falls_back_before_a_wrong_certificate(
    ca: Authority, other_ca: Authority
) -> None:
    both = over_tls(ca.sign("a"), ca, required=False)
    foreign = over_tls(other_ca.sign("b"), other_ca, required=False)
    assert "TLS failed" in await refusal(foreign, both)


async def test_renewed_files_count_from_the_next_connection_and_broken_ones_do_not(
    ca: Authority, tmp_path: Path
) -> None:
    shown = tmp_path / "tls.crt", tmp_path / "tls.key"

    def replace_by(pair: tuple[str, str]) -> None:
        for source, target in zip(pair, shown, strict=True):
            shutil.copy(source, tmp_path / "new")
            (tmp_path / "new").rename(target)

    replace_by(ca.sign("first", days=-1))
    server = over_tls((str(shown[0]), str(shown[1])), ca)
    asker = over_tls(ca.sign("a"), ca)
    assert "certificate has expired" in await refusal(server, asker)
    replace_by(ca.sign("second"))
    assert await answer(server, asker) == b"x"
    assert await answer(asker, server) == b"x"
    shown[1].write_text("no key")
    assert await answer(server, asker) == b"x"
    replace_by(ca.sign("third", days=-1))
    assert "certificate has expired" in await refusal(server, asker)


async def test_a_unix_socket_needs_no_tls(ca: Authority, tmp_path: Path) -> None:
    settings = over_tls(ca.sign("a"), ca)
    async with (
        asyncio.timeout(SECONDS),
        serving(Handler(), f"unix:{tmp_path}/s", settings=settings) as address,
        raw_peer(address) as peer,
        asking(address, settings=settings) as port,
    ):
        assert await call(port, Kind.PUT, b"x", LONG_MS) == b"x"
        peer.writer.write(b"\x00\x00")


async def test_a_peer_that_begins_tls_and_says_nothing_more_is_closed_in_the_time_of_a_hello(
    ca: Authority,
) -> None:
    settings = replace(over_tls(ca.sign("a"), ca), connect_timeout_ms=50)
    async with (
        asyncio.timeout(SECONDS),
        serving(Handler(), settings=settings) as address,
        raw_peer(address) as peer,
    ):
        peer.writer.write(b"\x16\x03\x01")
        assert await peer.reader.read() == b""


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        ("certificate", r"cluster\.tls_certificate = .*no usable PEM pair"),
        ("key", r"cluster\.tls_certificate = .*no usable PEM pair with .*cluster\.tls_key"),
        ("authority", r"cluster\.tls_authority = .*no certificates"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_start_with_its_setting(
    ca: Authority, tmp_path: Path, damaged: str, why: str
) -> None:
    certificate, key = ca.sign("a")
    files = {"certificate": certificate, "key": key, "authority": str(ca.certificate)}
    bad, none = tmp_path / "bad", tmp_path / "none"
    bad.write_text("nothing")
    none_why = rf"cluster\.tls_{damaged} = .*No such file"
    for path, expected in ((bad, why), (none, none_why)):
        given = {f"cluster.tls_{name}": file for name, file in files.items()}
        given[f"cluster.tls_{damaged}"] = str(path)
        with pytest.raises(ConfigError, match=expected):
            FrameTls.of(load_settings(None, {}, given).settings.cluster)


def test_a_certificate_needs_its_key_and_a_ca_in_the_settings() -> None:
    for given, missing in (
        ("certificate", "key"),
        ("key", "certificate"),
        ("authority", "certificate"),
    ):
        with pytest.raises(ConfigError, match=f"cluster.tls_{missing}"):
            load_settings(None, {}, {f"cluster.tls_{given}": "x"})
