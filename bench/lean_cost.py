"""CPU per unary call of the lean transport's core: bytes in, handler, bytes out, in this process.

    python -m bench.lean_cost [--calls 200000] [--per-tick 16] [--body 1263]

No socket and no loop, so it is the part that is ours.  The variants of headers are those of our
load generator.  Every answer is counted.
"""

import argparse
import time
from collections.abc import Callable

from popmq.cli.load.http2 import HEADER_VARIANTS, HeaderBlocks, Headers
from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.transport.interface import Call, Method, MethodType
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.bounds import LeanCounters
from popmq.proxy.transport.lean.connection import LeanConnection
from popmq.proxy.transport.lean.inbox import SharedInflow
from popmq.proxy.transport.lean.messages import InflationTurns
from popmq.proxy.transport.lean.replies import MESSAGE_PREFIX

PATH = "/apache.rocketmq.v2.MessagingService/SendMessage"
ANSWER = b"r" * 64
OK = b"\x0bgrpc-status\x010"
WINDOW = frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)


def answer(call: Call, data: bytes) -> None:
    call.metadata.get("x-mq-client-id", "")
    call.send(ANSWER)
    call.finish()


def run(variant: str, calls: int, per_tick: int, body: bytes) -> float:
    """Microseconds of CPU for a call."""
    clock = Clock()
    connection = LeanConnection(
        {PATH: Method(PATH, MethodType.UNARY, start=answer)},
        LeanSettings(),
        LeanCounters(),
        clock,
        lambda: None,
        SharedInflow(LeanSettings(), InflationTurns(lambda _: None)),
    )
    connection.receive(frames.PREFACE + frames.settings({}) + WINDOW, 0)
    blocks = HeaderBlocks(Headers("127.0.0.1:8081", "bench@1@0@aaaaaaaa", variant))
    connection.receive(frames.frame(frames.HEADERS, 0x5, 1, blocks.block(PATH)), 0)
    message = MESSAGE_PREFIX.pack(0, len(body)) + body
    connection.outbox.take()
    spent, answered, stream_id = 0, 0, 3
    while answered < calls:
        ticks = []
        for _ in range(200):
            parts = []
            for _ in range(per_tick):
                parts.append(frames.frame(frames.HEADERS, 0x4, stream_id, blocks.block(PATH)))
                parts.append(frames.frame(frames.DATA, 0x1, stream_id, message))
                stream_id += 2
            ticks.append(b"".join(parts))
        out = []
        began = time.process_time_ns()
        for data in ticks:
            connection.receive(data, clock())
            out.append(connection.outbox.take())
        spent += time.process_time_ns() - began
        got = b"".join(out).count(OK)
        assert got == 200 * per_tick, f"{got} answers to {200 * per_tick} calls"
        answered += got
        connection.receive(frames.window_update(0, _sent(out)), 0)
    return spent / answered / 1000


def _sent(out: list[bytes]) -> int:
    return sum(
        len(payload)
        for data in out
        for kind, _, _, payload in frames.Http2FrameReader(1 << 24).feed(data)
        if kind == frames.DATA
    )


class Clock:
    """Milliseconds that pass one by one, so that no rate is in the way."""

    def __init__(self) -> None:
        self._ms = 0

    def __call__(self) -> int:
        self._ms += 1
        return self._ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--per-tick", type=int, default=16)
    parser.add_argument("--body", type=int, default=1_263)
    args = parser.parse_args()
    show: Callable[[str], None] = print
    show(f"{args.calls} calls, {args.per_tick} a read, messages of {args.body} bytes")
    for variant in HEADER_VARIANTS:
        best = min(run(variant, args.calls // 4, args.per_tick, b"x" * args.body) for _ in range(4))
        show(f"{variant:8} {best:6.2f} us a call (best of 4)")


if __name__ == "__main__":
    main()
