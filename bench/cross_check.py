"""Our load generator against h2load: the same requests to the same server, in turns.

    python -m bench h2load [--seconds 5] [--rounds 3]

h2load (Debian's nghttp2-client) is C, repeats one request, and looks at the HTTP status only.  All
that it sends has one message id, so the broker is told not to recognise resends.  If the server's
CPU for a message is about the same, our loader makes the server look neither better nor worse.
"""

import re
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

from bench.alone import running
from bench.measure import Shape, send
from bench.peers.cache import debian_env, debian_program
from bench.peers.processes import cpu_s
from popmq.cli.load.reactor import LoadError
from popmq.cli.load.requests import SEND, SendTemplate
from popmq.cli.load.target import check_stored


def cross_check(
    folder: Path, *, shape: Shape, seconds: float, rounds: int, say: Callable[[str], None]
) -> None:
    program = debian_program("usr/bin/h2load")
    ours: list[float] = []
    theirs: list[float] = []
    with running(folder, more={"POPMQ_DEDUP_WINDOW_MS": "0"}) as peer:
        body = folder / "request.bin"
        body.write_bytes(SendTemplate(peer.topic.topic, 1024).request(0))
        for number in range(rounds):
            measure = send(peer, shape, body=1024, seconds=seconds, number=number, folder=folder)
            ours.append(measure.cpu_us)
            say(f"ours    {shape}: {measure.per_second:9.0f}/s {measure.cpu_us:7.1f} us a message")
            before, used = peer.stored(), cpu_s(peer.processes())
            messages = max(1_000, int(measure.per_second * seconds))
            done, rate = _h2load(program, peer.endpoint, body, shape, messages)
            used = cpu_s(peer.processes()) - used
            check_stored("h2load", done, before, peer.stored())
            theirs.append(used / done * 1e6)
            say(f"h2load  {shape}: {rate:9.0f}/s {theirs[-1]:7.1f} us a message")
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    say(f"server CPU under our load to that under h2load: {ratio:.2f}")


def _h2load(
    program: Path, endpoint: str, body: Path, shape: Shape, messages: int
) -> tuple[int, float]:
    """How many it counts as done, and how many a second."""
    headers = ("content-type: application/grpc", "te: trailers", "x-mq-client-id: h2load")
    messages -= messages % shape.connections
    argv = [str(program), "-n", str(messages), "-c", str(shape.connections)]
    argv += ["-m", str(shape.in_flight), "-t", "1", "-d", str(body)]
    argv += [word for header in headers for word in ("-H", header)]
    argv.append(f"http://{endpoint}{SEND}")
    ran = subprocess.run(argv, env=debian_env(), capture_output=True, text=True, timeout=300)
    match = re.search(r"([\d.]+) req/s.*?(\d+) succeeded", ran.stdout, re.DOTALL)
    if ran.returncode or match is None:
        raise LoadError(f"h2load ended with {ran.returncode}: {ran.stdout[-500:]}{ran.stderr}")
    return int(match[2]), float(match[1])
