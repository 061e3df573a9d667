"""What a record costs as the store grows, and how long a start takes.

    python -m bench.store_growth [--records 1000000 [10000000 ...]] [--body 100] [--json FILE]

For each size: CPU per record of append and dispatch in batches of 1,000 (each batch is one
fdatasync), of a snapshot per entry, and of recovery; seconds to a broker that serves, after a
kill, with and without the snapshot; resident memory.  The data goes to the current folder and
is removed.
"""

import argparse
import json
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.client_requests import ClientRequests
from popmq.broker.store.message_store import StoreThreads
from popmq.common.clock import SystemClock
from popmq.common.disk import ColdRead, RealDisk
from popmq.common.protocol.messaging_payloads import PopRequest, PutEntry, PutRequest
from popmq.common.settings.settings import Settings
from popmq.common.step_loop import InlineFlusher
from popmq.common.topics import MessageType, TopicConfig

BATCH = 1_000
QUEUES = 8
IN_FLIGHT = 50_000


@dataclass(frozen=True, slots=True)
class Growth:
    records: int
    append_us: float  # CPU: put, group commit, dispatch, key index
    last_tenth_us: float  # the same, of the last tenth of the records
    dispatch_us: float  # of that: confirmed records into their queues
    snapshot_us: float  # CPU per check point in flight
    start_with_snapshot_s: float
    start_without_s: float
    recovery_us: float  # CPU per record, without the snapshot
    rss_mib: int
    disk_mib: int


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def rss_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


def started(folder: Path) -> Broker:
    settings = Settings()
    store = replace(settings.store, segment_bytes=256 << 20)
    settings = replace(settings, store=store, broker=replace(settings.broker, data=str(folder)))
    broker = Broker(
        settings,
        disk=RealDisk(),
        clock=SystemClock(),
        threads=StoreThreads.of_one(InlineFlusher()),
        rng=random.Random(1),
    )
    broker.start()
    return broker


def watch_dispatch(broker: Broker) -> Callable[[], float]:
    """CPU seconds of dispatch since now; once for each batch, so that looking costs nothing."""
    dispatch, seconds = broker.store.dispatch, 0.0
    advance = dispatch.advance

    def timed(confirmed: int) -> set[tuple[int, int]]:
        nonlocal seconds
        began = time.thread_time()
        grown = advance(confirmed)
        seconds += time.thread_time() - began
        return grown

    dispatch.advance = timed  # type: ignore[method-assign]
    return lambda: seconds


def fill(broker: Broker, records: int, body: bytes) -> tuple[float, float, float]:
    """CPU per record over all, over the last tenth, and of dispatch over all."""
    pending: list[Callable[[], None]] = []
    broker.store.call_soon = pending.append
    dispatch_s = watch_dispatch(broker)
    requests = ClientRequests(broker)
    properties = b"\x1a\x20" + b"0123456789ABCDEF" * 2  # a message id of 32 characters
    request = PutRequest(
        "bench",
        [PutEntry(MessageType.NORMAL, body, properties, 0, q % QUEUES) for q in range(BATCH)],
    )
    begin = mark = cpu_s()
    batches = records // BATCH
    for number in range(batches):
        if number == batches - batches // 10:
            mark = cpu_s()
        requests.put(request)
        while pending:
            pending.pop()()
        broker.store.step()
    end = cpu_s()
    last_us = (end - mark) / (records // 10) * 1e6
    return (end - begin) / records * 1e6, last_us, dispatch_s() / records * 1e6


def pop_some(broker: Broker) -> None:
    params = ClientRequests(broker).resolve_pop(PopRequest("bench", "g", "bench", 32, 3_600_000, 0))
    for _ in range(IN_FLIGHT // 32):
        try:
            broker.pop.service.pop(params)
        except ColdRead as cold:  # the oldest messages of a large log have left the page cache
            cold.warm()
    broker.store._commit._hand_over()


def measure(records: int, body: int) -> Growth:
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-store-") as name:
        folder = Path(name)
        broker = started(folder)
        broker.registry.create_topic(TopicConfig(0, "bench", QUEUES))
        append_us, last_us, dispatch_us = fill(broker, records, bytes(body))
        pop_some(broker)
        memory = rss_mib()
        store = broker.store
        store._index_keeper.write_now()
        cpu = cpu_s()
        store.snapshots.make_now(store._snapshot_head())
        snapshot_us = (cpu_s() - cpu) / max(1, len(broker.table)) * 1e6
        store.release_files()
        began = time.perf_counter()
        broker = started(folder)
        with_snapshot_s = time.perf_counter() - began
        broker.release_files()
        shutil.rmtree(folder / "snapshot")
        began, cpu = time.perf_counter(), cpu_s()
        broker = started(folder)
        without_s, cpu = time.perf_counter() - began, cpu_s() - cpu
        read = broker.store.metrics.recovered_records
        broker.release_files()
        disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Growth(
        records,
        round(append_us, 2),
        round(last_us, 2),
        round(dispatch_us, 2),
        round(snapshot_us, 2),
        round(with_snapshot_s, 2),
        round(without_s, 2),
        round(cpu / read * 1e6, 2),
        memory,
        disk >> 20,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--records", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--body", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = [measure(records, args.body) for records in args.records]
    print(
        "| records | append us | last tenth us | dispatch us | snapshot us per check point | "
        "start with it s | without s | recovery us | RSS MiB | disk MiB |\n" + "|---" * 10 + "|"
    )
    for growth in results:
        print("| " + " | ".join(str(value) for value in asdict(growth).values()) + " |")
    first, last = results[0], results[-1]
    print(f"per record, {last.records:,} against {first.records:,} stored:")
    for what, large, small in (
        ("append in the last tenth", last.last_tenth_us, first.append_us),
        ("dispatch", last.dispatch_us, first.dispatch_us),
        ("recovery", last.recovery_us, first.recovery_us),
        ("snapshot, per check point", last.snapshot_us, first.snapshot_us),
    ):
        print(f"  {what}: {large / small:.2f}")
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
