"""A popmq for the loads, and a server whose every byte the test writes."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from popmq.cli.load.reactor import Reactor
from popmq.testing.running_broker import RunningBroker


@pytest.fixture(params=["grpcio", "lean"])
def popmq(request: pytest.FixtureRequest) -> Iterator[RunningBroker]:
    settings = {"proxy.transport": request.param, "topic.auto_create": False}
    with RunningBroker(settings=settings) as running:
        yield running


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor()
    yield reactor
    reactor.close()


# Takes what the server says after the client's first bytes; gives its address.
Serve = Callable[[bytes], tuple[str, int]]


@pytest.fixture
def says() -> Iterator[Serve]:
    """Listens once, reads the client's greeting, says something and hangs up."""
    threads = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(answer: bytes) -> tuple[str, int]:
        def talk() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass

        threads.append(threading.Thread(target=talk))
        threads[-1].start()
        host, port = listener.getsockname()
        return str(host), int(port)

    yield serve
    for thread in threads:
        thread.join(10)
    listener.close()
