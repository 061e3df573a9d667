"""Any bytes as a conversation with a lean connection, for fuzzers and for what they have found.

The input is a program: one byte says what the client, the clock or a handler does next, the bytes
behind it are its arguments.  So a mutation changes a frame, not only garbage before one.
"""

from typing import Any

from proxy.lean.peer import END, WHOLE, Peer, prefixed, zipped

from popmq.proxy.transport.lean import frames

MAX_STEPS = 60
LIMITS: dict[str, Any] = {
    "max_streams": 8,
    "max_header_bytes": 4_096,
    "max_message_bytes": 1 << 16,
    "max_inflated_bytes": 1 << 16,
    "max_incoming_bytes": 1 << 17,
    "max_unsent_bytes": 1 << 16,
    "max_control_per_s": 200,
    "max_resets_per_s": 50,
    "max_age_ms": 60_000,
    "max_age_grace_ms": 10_000,
    "compress_bytes": 300,
}
PATHS = ("/s/echo", "/s/held", "/s/flow", "/s/talk", "/s/none")
ENCODINGS = ("gzip", "deflate", "identity", "br")
KINDS = 12
HEAD = b"\x82\x86\x41\x01x\x04\x07/s/echo"  # the start of a request, for raw header blocks


class Input:
    """Arguments off the front of the bytes; zeros behind their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def take(self, size: int) -> bytes:
        result = self._data[self._at : self._at + size]
        self._at += size
        return result


class Conversation:
    """Plays an input; `frames` counts what was sent."""

    def __init__(self, data: bytes) -> None:
        self.frames = 0
        self._input = Input(data)
        first = self._input.byte()
        self._peer = Peer(settings={4: (0, 100, 65_535, 1 << 20)[first & 3]}, **LIMITS)
        self._piece_bytes = (1 << 20, 1, 7, 1 << 20)[first >> 2 & 3]

    def play(self) -> int:
        """How many frames the client sent. AssertionError if a bound was passed."""
        for _ in range(MAX_STEPS):
            if not self._input or self._peer.core.closing:
                break
            self._step()
            check_bounds(self._peer)
        self._peer.core.lost()
        written(self._peer)
        assert self._peer.core.streams == {}
        assert self._peer.counters.incoming_bytes == 0
        assert self._peer.core.outbox.unsent_bytes == 0
        return self.frames

    def _step(self) -> None:
        more, kind = self._input, self._input.byte() % KINDS
        if kind <= 1:
            self._request()
        elif kind == 2:
            self._send(frames.frame(more.byte() % 13, more.byte(), self._id(), self._bytes()))
        elif kind == 3:
            self._send(frames.frame(frames.DATA, more.byte() & END, self._id(), self._message()))
        elif kind == 4:
            block = HEAD + self._bytes() if more.byte() & 1 else self._bytes()
            self._block(self._peer.next_id(), block, more.byte())
        elif kind == 5:
            self._send(frames.window_update(self._id(), 1 << more.byte() % 31))
        elif kind == 6:
            self._send(frames.frame(frames.SETTINGS, more.byte() & 1, 0, more.take(6)))
        elif kind == 7:
            self._send(frames.reset(self._id(), more.byte()))
        elif kind == 8:
            self._peer.now_ms += 1 << more.byte() % 20
            self._peer.core.tick(self._peer.now_ms)
            written(self._peer)
        elif kind == 9:
            self._answer()
        elif kind == 10:
            self._send(frames.ping(self._bytes()[:8].ljust(8, b"\0"), ack=more.byte() & 1 > 0))
        else:
            self._send(self._bytes())

    def _request(self) -> None:
        flags = self._input.byte()
        extra = [("grpc-timeout", "1S")] if flags & 1 else []
        if flags & 2:
            extra.append(("grpc-encoding", ENCODINGS[flags >> 6]))
        if flags & 4:
            extra.append(("grpc-accept-encoding", "gzip"))
        path = PATHS[self._input.byte() % len(PATHS)]
        stream_id = self._peer.next_id()
        self._block(stream_id, self._peer.block(path, extra), flags >> 3)
        self._send(frames.frame(frames.DATA, flags >> 5 & END, stream_id, self._message()))

    def _block(self, stream_id: int, block: bytes, flags: int) -> None:
        """A header block, in one frame or in two."""
        if flags & 2:
            cut = self._input.byte() % (len(block) + 1)
            self._send(frames.frame(frames.HEADERS, flags & END, stream_id, block[:cut]))
            self._send(frames.frame(frames.CONTINUATION, WHOLE, stream_id, block[cut:]))
        else:
            self._send(frames.frame(frames.HEADERS, WHOLE | flags & END, stream_id, block))

    def _message(self) -> bytes:
        how = self._input.byte()
        content = self._bytes() * (1, 1, 1, 40)[how >> 2 & 3]
        if how & 3 == 0:
            return content
        return zipped(content) if how & 3 == 1 else prefixed(content)

    def _answer(self) -> None:
        which, size = self._input.byte(), self._input.byte() * (1, 100)[self._input.byte() & 1]
        if not self._peer.held.calls:
            return
        call = self._peer.held.calls[which % len(self._peer.held.calls)]
        call.send(b"y" * size)
        if which & 0x80:
            call.finish()
        written(self._peer)

    def _id(self) -> int:
        chosen = self._input.byte()
        if chosen > 250:
            return (0, 2, 99, frames.MAX_STREAM_ID, 0)[chosen - 251]
        return chosen % (max(0, self._peer.last_id // 2) + 1) * 2 + 1

    def _bytes(self) -> bytes:
        return self._input.take(self._input.byte())

    def _send(self, data: bytes) -> None:
        self.frames += 1
        size = self._piece_bytes
        for at in range(0, len(data), size):
            self._peer.core.receive(data[at : at + size], self._peer.now_ms)
            written(self._peer)


def play(data: bytes) -> int:
    return Conversation(data).play()


def check_bounds(peer: Peer) -> None:
    core, limits = peer.core, peer.limits
    assert len(core.streams) <= limits.max_streams
    assert core._reader.held_bytes <= 9 + limits.max_frame_bytes
    assert 0 <= peer.counters.incoming_bytes <= limits.max_incoming_bytes
    assert peer.counters.streams == len(core.streams)
    assert 0 <= core.outbox.unsent_bytes <= limits.max_unsent_bytes + 40_000
    assert len(core._decoder._heads) <= 64


def written(peer: Peer) -> None:
    """What was sent is frames, none longer than the client takes."""
    while peer.core.outbox.has_output:
        data = peer.core.outbox.take()
        got = list(frames.Http2FrameReader(frames.LARGEST_FRAME_BYTES).feed(data))
        assert sum(9 + len(payload) for _, _, _, payload in got) == len(data)
