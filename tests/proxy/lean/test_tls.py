"""TLS and plain text on one port, as clients meet them; and certificates that come and go."""

import asyncio
import datetime
import os
import random
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from proxy.lean.peer import echo

from popmq.common.settings.lean_settings import LeanSettings
from popmq.common.tls import session as tls
from popmq.common.tls.certificates import Certificates
from popmq.proxy.transport.interface import Call, Method, MethodType
from popmq.proxy.transport.lean import frames, self_signed
from popmq.proxy.transport.lean.server import LeanTransport

LOCAL = "127.0.0.1"
NOW = datetime.datetime.now(datetime.UTC)
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def repeat(call: Call, data: bytes) -> None:
    for _ in range(20):
        call.send(data)
    call.finish()


ECHO = Method("/s/echo", MethodType.UNARY, start=echo)
REPEAT = Method("/s/repeat", MethodType.SERVER_STREAM, start=repeat)


async def until(met: Callable[[], bool]) -> None:
    while not met():  # noqa: ASYNC110 - what it waits for has no event
        await asyncio.sleep(0.005)


def pair(folder: Path) -> tuple[str, str]:
    return self_signed.kept_in(folder, [], NOW)


@asynccontextmanager
async def listening(
    certificates: Certificates | None, *, tls_only: bool = False, **limits: Any
) -> AsyncIterator[tuple[LeanTransport, int]]:
    transport = LeanTransport(
        [ECHO, REPEAT],
        LOCAL,
        0,
        limits=replace(LeanSettings(), **limits),
        certificates=certificates,
        tls_only=tls_only,
    )
    port = await transport.start()
    try:
        yield transport, port
    finally:
        await transport.stop(0)


def secure(port: int, certificate: str) -> Any:
    roots = grpc.ssl_channel_credentials(Path(certificate).read_bytes())
    return grpc.aio.secure_channel(f"{LOCAL}:{port}", roots, options=OPTIONS)


def plain(port: int) -> Any:
    return grpc.aio.insecure_channel(f"{LOCAL}:{port}", options=OPTIONS)


def trusting(certificate: str, *protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificate)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


async def said_over_tls(port: int, context: ssl.SSLContext, words: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(LOCAL, port, ssl=context)
    writer.write(words)
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_real_client_that_checks_the_certificate_sends_much_both_ways(
    tmp_path: Path,
) -> None:
    files = pair(tmp_path)
    async with listening(Certificates.of_files(*files)) as (transport, port):
        async with secure(port, files[0]) as client:
            body = bytes(range(256)) * 4_096
            assert await client.unary_unary("/s/echo")(body) == body
            call = client.unary_stream("/s/repeat")(body)
            assert [item == body async for item in call] == [True] * 20
        assert transport.counters.faults == 0
        assert not transport.counters.tls_refused


async def test_tls_and_plain_text_share_a_port_at_the_same_time(tmp_path: Path) -> None:
    files = pair(tmp_path)
    async with (
        listening(Certificates.of_files(*files)) as (transport, port),
        secure(port, files[0]) as safe,
        plain(port) as open_one,
    ):
        calls = [
            client.unary_unary("/s/echo")(b"%d" % number)
            for number in range(200)
            for client in (safe, open_one)
        ]
        answers = await asyncio.gather(*calls)
        assert answers == [b"%d" % (number // 2) for number in range(400)]
        assert transport.counters.connections == 2


@pytest.mark.parametrize("protocols", [(), ("http/1.1",)])
async def test_a_client_that_does_not_name_http_2_is_told_so(
    tmp_path: Path, protocols: tuple[str, ...]
) -> None:
    files = pair(tmp_path)
    async with listening(Certificates.of_files(*files)) as (transport, port):
        context = trusting(files[0], *protocols)
        http_2 = await said_over_tls(port, context, frames.PREFACE + frames.settings({}))
        cut = list(frames.Http2FrameReader(frames.LARGEST_FRAME_BYTES).feed(http_2))
        assert cut[0][0] == frames.SETTINGS
        kind, _, _, payload = cut[-1]
        assert kind == frames.GOAWAY
        assert payload[4:8] == frames.ErrorCode.INADEQUATE_SECURITY.to_bytes(4, "big")
        assert b"has to name by ALPN (h2)" in payload
        http_1 = await said_over_tls(port, context, b"GET / HTTP/1.1\r\n\r\n")
        assert http_1.startswith(b"HTTP/1.1 505 ")
        assert b"has to name by ALPN (h2)" in http_1
        assert dict(transport.counters.tls_refused) == {"alpn": 2}


async def test_garbage_that_begins_like_tls_gets_an_alert_and_harms_nobody(tmp_path: Path) -> None:
    seed = 7

    async def test() -> None:
        chance = random.Random(seed)
        files = pair(tmp_path)
        async with listening(Certificates.of_files(*files)) as (transport, port):
            async with secure(port, files[0]) as client:
                assert await client.unary_unary("/s/echo")(b"x") == b"x"
                for _ in range(50):
                    reader, writer = await asyncio.open_connection(LOCAL, port)
                    size = chance.randint(1, 60)
                    record = b"\x16\3\1" + size.to_bytes(2, "big") + chance.randbytes(size)
                    writer.write(record + chance.randbytes(100))
                    writer.write_eof()
                    await reader.read()
                    writer.close()
                assert await client.unary_unary("/s/echo")(b"y") == b"y"
            await until(lambda: transport.counters.connections == 0)
            assert transport.counters.tls_refused["handshake"] > 25

    print(f"seed {seed}")
    await test()


async def test_a_record_that_was_changed_on_the_way_ends_its_connection_only(
    tmp_path: Path,
) -> None:
    files = pair(tmp_path)
    async with listening(Certificates.of_files(*files)) as (transport, port):
        client = ClientSide(trusting(files[0], "h2"))
        reader, writer = await asyncio.open_connection(LOCAL, port)
        while not client.shake():
            writer.write(client.take())
            client.give(await reader.read(1 << 16))
        writer.write(client.take())
        broken = bytearray(client.sealed(frames.PREFACE + frames.settings({})))
        broken[-1] ^= 1
        writer.write(broken)
        await reader.read()
        writer.close()
        assert dict(transport.counters.tls_refused) == {"record": 1}


@pytest.mark.more
async def test_half_a_handshake_is_cut_off_in_time(tmp_path: Path) -> None:
    files = pair(tmp_path)
    async with listening(Certificates.of_files(*files), handshake_ms=10) as (server, port):
        hello = ClientSide(trusting(files[0], "h2"))
        hello.shake()
        first = hello.take()
        for words in (first[:1], first[:100], first):
            reader, writer = await asyncio.open_connection(LOCAL, port)
            writer.write(words)
            await reader.read()
            writer.close()
        await until(lambda: server.counters.connections == 0)
        assert dict(server.counters.cut_off) == {"handshake": 3}


async def test_a_port_without_tls_answers_tls_with_an_alert() -> None:
    async with listening(None) as (transport, port):
        with pytest.raises(ssl.SSLError) as caught:
            await asyncio.open_connection(LOCAL, port, ssl=ssl._create_unverified_context())
        assert "HANDSHAKE_FAILURE" in str(caught.value)
        assert dict(transport.counters.tls_refused) == {"off": 1}
        async with plain(port) as client:
            assert await client.unary_unary("/s/echo")(b"x") == b"x"


async def test_a_port_with_tls_only_says_so_to_plain_text(tmp_path: Path) -> None:
    files = pair(tmp_path)
    async with listening(Certificates.of_files(*files), tls_only=True) as (transport, port):
        reader, writer = await asyncio.open_connection(LOCAL, port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 505")
        assert b"this port takes TLS only (proxy.tls)" in answer
        writer.close()
        async with plain(port) as client:
            for path in ("/s/echo", "/s/absent"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await client.unary_unary(path)(b"x")
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                assert caught.value.details() == "this port takes TLS only (proxy.tls)"
        async with secure(port, files[0]) as client:
            assert await client.unary_unary("/s/echo")(b"x") == b"x"
        assert dict(transport.counters.tls_refused) == {"plain": 2}


def shown(port: int, certificate: str) -> Coroutine[Any, Any, bytes]:
    """The certificate that a new connection is shown."""

    async def ask() -> bytes:
        context = trusting(certificate, "h2")
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        _, writer = await asyncio.open_connection(LOCAL, port, ssl=context)
        result = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        assert isinstance(result, bytes)
        return result

    return ask()


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


async def test_a_certificate_is_changed_without_a_restart_and_old_connections_live(
    tmp_path: Path,
) -> None:
    live, new = tmp_path / "live", tmp_path / "new"
    files = pair(live)
    pair(new)
    certificates = Certificates.of_files(*files)
    async with listening(certificates) as (_, port), secure(port, files[0]) as old:
        assert await old.unary_unary("/s/echo")(b"x") == b"x"
        before = await shown(port, files[0])
        assert before == der(live / "certificate.pem")
        os.replace(new / "certificate.pem", live / "certificate.pem")
        # Between the two files nothing fits: the old pair stays.
        await until(lambda: certificates.refused == 1)
        assert await shown(port, files[0]) == before
        os.replace(new / "key.pem", live / "key.pem")
        await until(lambda: certificates.reloaded == 1)
        after = await shown(port, files[0])
        assert after == der(live / "certificate.pem") != before
        assert await old.unary_unary("/s/echo")(b"y") == b"y"
        async with secure(port, files[0]) as later:
            assert await later.unary_unary("/s/echo")(b"z") == b"z"
        assert (certificates.refused, certificates.reloaded) == (1, 1)


# -- without sockets


class ClientSide:
    """A client's TLS, as bytes."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.session = context.wrap_bio(self.incoming, self.outgoing, server_hostname=LOCAL)

    def shake(self) -> bool:
        try:
            self.session.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def give(self, data: bytes) -> None:
        self.incoming.write(data)

    def take(self) -> bytes:
        return self.outgoing.read()

    def sealed(self, data: bytes) -> bytes:
        self.session.write(data)
        return self.take()

    def opened(self) -> bytes:
        result = b""
        try:
            while part := self.session.read(1 << 16):
                result += part
        except ssl.SSLWantReadError:
            pass
        return result


def shaken(tmp_path: Path, size: int) -> tuple[tls.TlsSession, ClientSide]:
    """Both sides, after a handshake in pieces of `size` bytes."""
    files = pair(tmp_path)
    server = tls.TlsSession(Certificates.of_files(*files).context())
    client = ClientSide(trusting(files[0], "h2"))
    while not (client.shake() and server.established):
        asked = client.take()
        for start in range(0, len(asked), size):
            assert server.feed(asked[start : start + size]) == b""
        client.give(server.take())
    return server, client


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_records_may_come_in_any_pieces(tmp_path: Path, size: int) -> None:
    server, client = shaken(tmp_path, size)
    assert server.protocol == "h2"
    data = random.Random(1).randbytes(50_000)
    records = client.sealed(data[:20_000]) + client.sealed(data[20_000:])
    feeds = b"".join(
        server.feed(records[start : start + size]) for start in range(0, len(records), size)
    )
    assert feeds == data
    client.give(server.seal(data))
    assert client.opened() == data


def test_a_good_bye_ends_a_session_behind_its_last_words(tmp_path: Path) -> None:
    server, client = shaken(tmp_path, 10_000)
    last = client.sealed(b"last words")
    with pytest.raises(ssl.SSLWantReadError):
        client.session.unwrap()
    assert server.feed(last + client.take()) == b"last words"
    assert server.ended
    client.give(server.close())
    client.session.unwrap()


def test_a_client_cannot_have_the_handshake_repeated(tmp_path: Path) -> None:
    context = Certificates.of_files(*pair(tmp_path)).context()
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
