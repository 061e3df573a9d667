"""Sockets and timers of a load, in one thread; a turn of asyncio costs more than a call here.

What goes wrong on a socket ends the whole run with LoadError: a figure of half a run is none.
"""

import heapq
import selectors
import socket
import time
from abc import abstractmethod
from collections.abc import Callable
from itertools import count

from popmq.common.address import format_address
from popmq.common.errors import PopmqError

READ_BYTES = 1 << 18
CONNECT_S = 10.0


class LoadError(PopmqError):
    """The run cannot go on, or its figures would say nothing."""


class Reactor:
    """Times are seconds of `time.perf_counter`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def watch(self, channel: "Channel", *, writing: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        try:
            self._selector.modify(channel.socket, events, channel)
        except KeyError:
            self._selector.register(channel.socket, events, channel)

    def forget(self, channel: "Channel") -> None:
        self._selector.unregister(channel.socket)

    def at(self, due_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (due_s, next(self._numbers), call))

    def run(self, over: Callable[[], bool], *, limit_s: float, what: str) -> None:
        """Turn until `over`; LoadError when it is not within `limit_s`, with `what` in its text."""
        give_up = time.perf_counter() + limit_s
        while not over():
            now = time.perf_counter()
            if now > give_up:
                raise LoadError(f"{what}: not over after {limit_s:g} s")
            until = self._timers[0][0] if self._timers else give_up
            # epoll counts in milliseconds and rounds up: the last one is spent looking.
            for key, events in self._selector.select(max(0.0, until - now - 0.0005)):
                channel: Channel = key.data
                if events & selectors.EVENT_READ:
                    channel.readable()
                if events & selectors.EVENT_WRITE:
                    channel.flush()
            self._run_timers()

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()

    def _run_timers(self) -> None:
        now = time.perf_counter()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()


class Channel:
    """One TCP connection. What is in `out` goes with the next `flush`."""

    def __init__(self, reactor: Reactor, address: tuple[str, int]) -> None:
        self.reactor = reactor
        self.out: list[bytes] = []
        self._unsent = b""
        try:
            self.socket = socket.create_connection(address, timeout=CONNECT_S)
        except OSError as error:
            raise LoadError(f"cannot connect to {format_address(*address)}: {error}") from error
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        reactor.watch(self, writing=False)

    @abstractmethod
    def received(self, data: bytes) -> None:
        """Bytes came, cut anywhere."""

    def readable(self) -> None:
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise LoadError(f"a connection broke: {error}") from error
        if not data:
            raise LoadError("the server closed a connection")
        self.received(data)
        if self.out:
            self.flush()

    def flush(self) -> None:
        if self._unsent:
            self.out.insert(0, self._unsent)
        data = b"".join(self.out)
        self.out.clear()
        if not data:
            return
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise LoadError(f"a connection broke: {error}") from error
        had, self._unsent = bool(self._unsent), data[sent:]
        if bool(self._unsent) != had:
            self.reactor.watch(self, writing=bool(self._unsent))

    def close(self) -> None:
        self.reactor.forget(self)
        self.socket.close()
