"""A failure of ours on one client's connection closes that connection; others, and the process,
go on.  What fails apart from any client ends the process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import cast

import pytest
from proxy.lean.peer import echo
from proxy.lean.test_sockets import LOCAL, channel

from popmq.common.tls.certificates import Certificates
from popmq.common.unhandled import UnhandledExceptions
from popmq.proxy.transport.interface import Method, MethodType
from popmq.proxy.transport.lean.server import LeanTransport

ECHO = Method("/s/echo", MethodType.UNARY, start=echo)
TLS_HANDSHAKE = b"\x16\x03\x01"


@pytest.fixture(autouse=True)
def own_thread_hook() -> Iterator[None]:
    before = threading.excepthook
    yield
    threading.excepthook = before


class FailingCertificates:
    """Fails for each client that speaks TLS, and, when told to, once a second."""

    def __init__(self, *, fails_at_refresh: bool) -> None:
        self._fails_at_refresh = fails_at_refresh

    def context(self) -> None:
        raise RuntimeError("a planted failure")

    def refresh(self) -> None:
        if self._fails_at_refresh:
            raise RuntimeError("a planted failure")


def failing_transport(*, fails_at_refresh: bool) -> LeanTransport:
    # Only the two methods above are called.
    certificates = cast(Certificates, FailingCertificates(fails_at_refresh=fails_at_refresh))
    return LeanTransport([ECHO], LOCAL, 0, certificates=certificates)


async def test_a_failure_on_one_clients_bytes_closes_the_connection_of_that_client_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors: list[BaseException] = []

    UnhandledExceptions(errors.append).install(asyncio.get_running_loop())
    transport = failing_transport(fails_at_refresh=False)
    port = await transport.start()
    async with channel(port) as other:
        assert await other.unary_unary("/s/echo")(b"before") == b"before"
        reader, writer = await asyncio.open_connection(LOCAL, port)
        writer.write(TLS_HANDSHAKE)
        with suppress(ConnectionResetError):  # an orderly end is as good
            assert await reader.read() == b""
        writer.close()
        assert await other.unary_unary("/s/echo")(b"after") == b"after"
        assert len(transport.connections) == 1
    await transport.stop(0)

    assert not errors
    assert "RuntimeError: a planted failure" in caplog.text


async def test_a_failure_that_belongs_to_no_client_ends_the_process() -> None:
    errors: list[BaseException] = []

    ended = asyncio.Event()

    def end(error: BaseException) -> None:
        errors.append(error)
        ended.set()

    UnhandledExceptions(end).install(asyncio.get_running_loop())
    transport = failing_transport(fails_at_refresh=True)
    await transport.start()
    await ended.wait()
    await transport.stop(0)

    assert str(errors[0]) == "a planted failure"
