"""Fuzzing of requests and frames: what a client sends reaches a whole server without sockets.

    cd tests && python -m proxy.request_fuzz --inputs 200000 [--seed N]

An input is a connection with a few calls.  Each request is made from its definition, with names,
handles and numbers that mean something here, and then changed: fields are repeated, removed,
moved, nested or cut.  It is compressed or not and sent in frames, of which some are changed, too.
An exception, a step of 100 ms of CPU, or 64 MiB more memory ends the run with the input's seed.
"""

import argparse
import asyncio
import gc
import gzip
import logging
import random
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from hpack import Decoder, Encoder
from proxy.lane_client import GROUP, TOPICS
from proxy.lane_world import Server
from proxy.lean.peer import END, WHOLE, decoded, request_headers
from proxy.lean.test_fuzz import mutated

from popmq.proxy.api.service_pb2 import AckMessageResponse
from popmq.proxy.rpc.request_limits import _FILES
from popmq.proxy.rpc.wire_scan import BadWire, chunk, fields, scalar, tag
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.connection import LeanConnection

LONGEST_S = 0.1
MORE_BYTES = 64 << 20
INPUTS_OF_A_SERVER = 250
MIB = 1 << 20
BROKER = "broker-a"
TEXTS = (
    *TOPICS,
    *(GROUP, "%DLQ%workers", "%RETRY%workers", "n%orders", "none", "", "*", "a || b", "\0", "é"),
    *("a" * 300, "-1", "a = 1", "NOT " * 90 + "a", "a LIKE '%x%'", "(" * 70, "MD5", "127.0.0.1"),
)
NUMBERS = (0, 1, 2, 3, 5, 31, 32, 60, 1_024, 65_535, 1 << 31, (1 << 31) - 1, 1 << 62, -1)
KINDS: dict[str, Descriptor] = {
    f"/{name}/{method.name}": method.input_type
    for name, file in _FILES.items()
    for method in file.services_by_name[name.rpartition(".")[2]].methods
}
OFTEN = [path for path in KINDS if "MessagingService" in path]


class Faults(logging.Handler):
    """Exceptions that the server caught and logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class Requests:
    """Makes the bytes of requests; `handles` are good ones."""

    def __init__(self, dice: random.Random, handles: list[str]) -> None:
        self._dice = dice
        self._handles = handles
        self._present = 1.0

    def of(self, kind: Descriptor) -> bytes:
        self._present = self._dice.choice((0.5, 0.95, 1.0))  # of the fields
        data = self._message(kind, "", 0)
        while self._dice.random() < 0.3:
            data = self._changed(data)
        return data

    def _message(self, kind: Descriptor, name: str, depth: int) -> bytes:
        """`name` is that of the field that holds it."""
        dice, parts = self._dice, []
        for field in kind.fields:
            rare = depth > 4 or field.name == "resource_namespace"
            if dice.random() < (0.05 if rare else self._present):
                count = dice.choice((1, 1, 1, 2, 5)) if field.is_repeated else 1
                parts += [self._field(field, name, depth) for _ in range(count)]
        return b"".join(parts)

    def _field(self, field: FieldDescriptor, name: str, depth: int) -> bytes:
        dice, number = self._dice, field.number
        if field.message_type is not None:
            return chunk(number, self._message(field.message_type, field.name, depth + 1))
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            return chunk(number, self._text(field, name))
        if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64):
            return tag(number, 1) + dice.randbytes(8)
        if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32):
            return tag(number, 5) + dice.randbytes(4)
        if field.enum_type is not None and dice.random() < 0.95:
            return scalar(number, dice.choice(field.enum_type.values).number)
        return scalar(number, dice.choice(NUMBERS) + dice.choice((0, 0, 0, 1)))

    def _text(self, field: FieldDescriptor, name: str) -> bytes:
        dice = self._dice
        if dice.random() < 0.02:
            return dice.randbytes(dice.choice((1, 20)))  # seldom UTF-8
        if "handle" in field.name:
            return mutated(dice, dice.choice(self._handles).encode())
        if field.name == "name" and dice.random() < 0.9:
            known = {"group": (GROUP,), "broker": (BROKER,)}.get(name, TOPICS)
            return dice.choice(known).encode()
        if field.name == "message_id":
            return b"%032X" % dice.getrandbits(64)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return dice.randbytes(dice.choice((0, 1, 20, 5_000)))
        return dice.choice(TEXTS).encode()

    def _changed(self, data: bytes) -> bytes:
        """Fields repeated, removed, moved, nested, unknown or cut; or bytes changed."""
        dice = self._dice
        try:
            fields_found = list(fields(data))
        except BadWire:
            return mutated(dice, data)
        if not fields_found:
            return data + scalar(dice.choice((1, 7, 9_999)), 1)
        field = dice.choice(fields_found)
        piece = data[field.start : field.end]
        match dice.randrange(7):
            case 0:
                most = dice.choice((3, 3, 40, 1_025, 20_000, 300_000))
                again = piece * min(most, 2 * MIB // len(piece))
            case 1:
                again = b""
            case 2:
                again = chunk(field.number, piece)
                for _ in range(dice.choice((1, 3, 90, 2_000))):
                    again = chunk(field.number, again)
            case 3:
                again = piece[: dice.randrange(len(piece))]
            case 4:
                again = tag(field.number, dice.choice((0, 1, 2, 3, 4, 5, 6))) + piece
            case 5:  # inside of it
                inner = self._changed(data[field.content : field.end])
                again = chunk(field.number, inner)
            case _:
                entry = dice.choice((b"", scalar(1, 1), chunk(1, b"k") + chunk(2, b"")))
                again = chunk(field.number, entry) * dice.choice((2, 1_100, 100_000))
        return data[: field.start] + again + data[field.end :]


class Fuzz:
    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.longest_s = 0.0
        self.faults = Faults()
        self._server = Server(lanes=True, names=(BROKER,))
        self._handles: list[str] = []
        self._inputs = 0
        self.most_bytes = 0

    def start(self) -> None:
        """A new server, so that what earlier inputs made does not grow for ever."""
        gc.collect()
        self._server = Server(lanes=True, names=(BROKER,))
        core = self._server.ports[BROKER].core
        for number in range(20):
            core.send("orders", b"%d" % number)
        self._handles = [got.handle.decode() for got in core.receive("orders", GROUP, limit=20)] + [
            b64encode(b"no handle").decode(),
            "",
        ]

    async def play(self, seed: int) -> None:
        dice = random.Random(seed)
        if self._inputs % INPUTS_OF_A_SERVER == 0:
            self.start()
        self._inputs += 1
        connection = self._server.connect()
        greeting = frames.PREFACE + frames.settings({4: dice.choice((90, MIB, MIB))})
        self._step(connection, greeting + frames.window_update(0, 1 << 24))
        encoder, decoder = Encoder(), Decoder()
        for number in range(dice.choice((1, 1, 2, 3))):
            path = dice.choice(OFTEN if dice.random() < 0.8 else list(KINDS))
            data = Requests(dice, self._handles).of(KINDS[path])
            parts = _frames(dice, encoder, path, data, 2 * number + 1)
            del data
            forget_peak()
            held_bytes = peak_bytes()
            for part in parts:
                self._step(connection, part)
            await self._turn()
            self.most_bytes = max(self.most_bytes, peak_bytes() - held_bytes)
            assert self.most_bytes <= MORE_BYTES, f"{self.most_bytes >> 20} MiB more memory"
        if dice.random() < 0.05:
            self._timed(partial(self._server.advance, dice.choice((10, 40_000))))
            self._timed(partial(connection.tick, self._server.clock.boot_ms()))
        while self._server.soon or any(port.waiting for port in self._server.ports.values()):
            await self._turn()
        self._note(connection.outbox.take(), decoder)
        connection.lost()
        assert not self.faults.lines, self.faults.lines[0]

    async def _turn(self) -> None:
        self._timed(self._server.end_turn)
        self._timed(self._server.serve)
        began_s = time.thread_time()
        await asyncio.sleep(0)
        self._took(began_s)

    def _step(self, connection: LeanConnection, data: bytes) -> None:
        self._timed(partial(connection.receive, data, self._server.clock.boot_ms()))

    def _timed(self, step: Callable[[], object]) -> None:
        began_s = time.thread_time()
        step()
        self._took(began_s)

    def _took(self, began_s: float) -> None:
        self.longest_s = max(self.longest_s, time.thread_time() - began_s)
        assert self.longest_s <= LONGEST_S, f"{self.longest_s:.3f} s of CPU in one step"

    def _note(self, output: bytes, decoder: Decoder) -> None:
        """How the calls ended: with which status, and which code in the reply."""
        for kind, _, _, payload in frames.Http2FrameReader(frames.LARGEST_FRAME_BYTES).feed(output):
            if kind == frames.HEADERS:
                status = decoded(decoder, payload).get("grpc-status")
                if status is not None:
                    self.outcomes[f"status {status}"] += 1
            elif kind == frames.DATA:
                with suppress(DecodeError):
                    code = AckMessageResponse.FromString(payload[5:]).status.code
                    self.outcomes[f"code {code}"] += 1
            elif kind == frames.GOAWAY:
                self.outcomes["connection refused"] += 1


def _frames(dice: random.Random, encoder: Any, path: str, data: bytes, stream: int) -> list[bytes]:
    """One call, cut anywhere; in one of ten something of the frames is changed."""
    extra = (
        [("grpc-timeout", dice.choice(("1S",) * 9 + ("50m", "x")))] if dice.random() < 0.3 else []
    )
    flag = b"\0"
    if len(data) > 10_000 or dice.random() < 0.2:
        extra.append(("grpc-encoding", "gzip"))
        data, flag = gzip.compress(data, 1, mtime=0), b"\1"
    block = encoder.encode([*request_headers(path), *extra])
    content = flag + len(data).to_bytes(4, "big") + data
    most = dice.choice((16_384, 16_384, 100, 1)) if len(content) < 400 else 16_384
    parts = [frames.frame(frames.HEADERS, WHOLE, stream, block)]
    for at in range(0, len(content), most):
        last = END if at + most >= len(content) and dice.random() < 0.95 else 0
        parts.append(frames.frame(frames.DATA, last, stream, content[at : at + most]))
    if dice.random() < 0.1:
        at = dice.randrange(len(parts))
        other = frames.frame(dice.randrange(12), dice.randrange(256), stream, dice.randbytes(8))
        parts[at : at + dice.randrange(2)] = [dice.choice((mutated(dice, parts[at]), other))]
    return parts


def forget_peak() -> None:
    """From here on `peak_bytes` begins with what is held now (man proc_pid_clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


async def run(seed: int, inputs: int) -> Counter[str]:
    """How the calls ended. `seed` is that of the first input; input N has seed + N."""
    fuzz = Fuzz()
    logging.getLogger().addHandler(fuzz.faults)
    for number in range(2 * INPUTS_OF_A_SERVER):  # what is loaded at its first use
        await fuzz.play(number)
    fuzz.longest_s, fuzz.most_bytes = 0.0, 0
    fuzz.outcomes.clear()
    for number in range(inputs):
        try:
            await fuzz.play(seed + number)
        except BaseException:
            print(f"input {number} from seed {seed}: --inputs 1 --seed {seed + number}")
            raise
    print(
        f"{inputs} inputs from seed {seed}, 0 crashes, slowest step "
        f"{fuzz.longest_s * 1_000:.1f} ms of CPU, "
        f"at most +{fuzz.most_bytes >> 20} MiB"
    )
    for outcome, count in sorted(fuzz.outcomes.items()):
        print(f"  {count:>9} {outcome}")
    return fuzz.outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    asyncio.run(run(given.seed, given.inputs))


if __name__ == "__main__":
    main()
