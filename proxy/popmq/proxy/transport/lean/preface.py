"""The first bytes of a connection: HTTP/2 with prior knowledge, or somebody who is wrong here."""

from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.frames import ConnectionFault, ErrorCode

_HTTP_1_VERBS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"CONNECT ")
_HTTP_2_ONLY = "this port speaks gRPC over HTTP/2"


class Http1Peer(Exception):
    """The peer is a browser or curl; `http_1` tells it."""


def http_1(why: str) -> bytes:
    """An answer that somebody who speaks HTTP/1.1 can show; `why` or that it is the wrong port."""
    text = (why or _HTTP_2_ONLY).encode() + b"\n"
    return (
        b"HTTP/1.1 505 HTTP Version Not Supported\r\nconnection: close\r\n"
        b"content-type: text/plain\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text)
    )


class Preface:
    """Waits for the 24 bytes that open every HTTP/2 connection."""

    __slots__ = ("_early", "complete")

    def __init__(self) -> None:
        self._early = b""
        self.complete = False

    def feed(self, data: bytes) -> bytes:
        """What follows the preface. Raises Http1Peer, or ConnectionFault for anything else."""
        data = self._early + data
        size = min(len(data), len(frames.PREFACE))
        if data[:size] != frames.PREFACE[:size]:
            if data.startswith(_HTTP_1_VERBS):
                raise Http1Peer
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2")
        self.complete = size == len(frames.PREFACE)
        self._early = b"" if self.complete else data
        return data[size:]


def greeting(limits: LeanSettings) -> bytes:
    """Our SETTINGS, and the connection's window, which SETTINGS cannot change."""
    ours = {
        frames.MAX_CONCURRENT_STREAMS: limits.max_streams,
        frames.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
        frames.MAX_FRAME_SIZE: limits.max_frame_bytes,
        frames.MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
    }
    more = limits.connection_window_bytes - frames.DEFAULT_WINDOW
    return frames.settings(ours) + (frames.window_update(0, more) if more > 0 else b"")
