"""How fast Spark reads revive records: rows per second of CPU, and whether it grows linearly.

    python -m bench.spark_source [--records 1000000,3000000,10000000] [--rounds 2] [--columns a,b]

A whole popmq serves the records, in a process of its own: its revive queues are filled beside the
log (their bytes are as a broker writes them), everything that is asked goes through the proxy's
port.  Spark groups the table by consumer group (count, max, mean), on one core (`local[1]`).
CPU counts the JVM and the Python workers together; the broker's is told apart.  The data goes to
the current folder and is removed.  Needs `pip install 'popmq[reports]'`.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.pop_check_point import ReviveKind, ReviveRecord
from popmq.broker.node.broker_process import BrokerProcess
from popmq.cli.roles.one_process import UP_DEFAULTS, OneProcess
from popmq.common import topics
from popmq.common.record.message import RecordKind, Stamp, encode_record
from popmq.common.settings.settings import load_settings

COLUMNS = (
    *("kind", "log_ms", "epoch", "sequence", "messages", "group", "topic", "queue"),
    *("start_offset", "revive_at_ms", "client", "position"),
)
_CHUNK = 4_096  # records that are encoded once and then repeated
_TICK = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--records", default="1000000,3000000,10000000")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(_serve(args.serve))
        return 0
    print(f"{len(args.columns.split(','))} columns, local[1]")
    for records in map(int, args.records.split(",")):
        with tempfile.TemporaryDirectory(dir=".", prefix="bench-spark-") as folder:
            _measure(records, args.rounds, args.columns, folder)
    return 0


# -- what serves


async def _serve(records: int) -> None:
    values = {
        **UP_DEFAULTS,
        "broker.data": "data",
        "proxy.listen": "127.0.0.1:0",
        "http.listen": "127.0.0.1:0",
        "reports.read_bytes_per_second": 10_000_000_000,
        "store.reserved_segments": 1,
    }
    settings = load_settings(None, {}, values).settings
    process = BrokerProcess(settings)
    one = OneProcess(settings, process)
    await one.start()
    try:
        _fill(process.broker, records)
        print(one.endpoint, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await one.stop()


def _fill(broker: Broker, records: int) -> None:
    units = [_unit(number) for number in range(_CHUNK)]
    for number in range(topics.REVIVE_QUEUES):
        queue = broker.store.queue(topics.REVIVE_TOPIC_ID, number)
        for at in range(records // topics.REVIVE_QUEUES):
            queue.append(units[at % _CHUNK], 0)
            if at % 65_536 == 0:
                queue.flush()
        queue.flush()


def _unit(number: int) -> bytes:
    """Check points and acks by turns, of 16 groups in 16 topics and 200 clients."""
    sequence = number // 2 * topics.REVIVE_QUEUES
    record = ReviveRecord(ReviveKind.ACK, 1, sequence, 0b111)
    if number % 2 == 0:
        record = ReviveRecord(
            *(ReviveKind.CHECK_POINT, 1, sequence, 0b111, 3 * number),
            topic_id=topics.FIRST_USER_TOPIC_ID + number % 16,
            group_id=1 + number % 16,
            queue_id=number % 8,
            link=3 * number + 3,
            revive_at_ms=1_700_000_060_000 + number,
            client=1 + number % 200,
        )
    return encode_record(
        kind=RecordKind.REVIVE,
        stamp=Stamp(1, 1_700_000_000_000 + number, 1_700_000_000_000 + number),
        position=number % 128,  # below the log's end, which ends what a report reads
        topic_id=topics.REVIVE_TOPIC_ID,
        queue_id=0,
        queue_offset=number,
        body=record.encode(),
    )


# -- what reads


def _measure(records: int, rounds: int, columns: str, folder: str) -> None:
    command = [sys.executable, "-m", "bench.spark_source", "--serve", str(records)]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            endpoint = server.stdout.readline().decode().strip()
            _read(records, rounds, columns, endpoint, server.pid)
        finally:
            server.stdin.close()
            server.wait()


def _read(records: int, rounds: int, columns: str, endpoint: str, server: int) -> None:
    from popmq.reports.session import spark_session

    with spark_session("bench", master="local[1]") as spark:
        frame = spark.read.format("popmq").option("endpoint", endpoint).option("columns", columns)
        _sums(frame.option("columns", "kind,messages").load("revive").limit(10))  # warm
        frame = frame.option("columns", columns).option("rowsPerPartition", "1000000")
        java = spark.sparkContext._gateway.proc.pid
        for _ in range(rounds):
            before, broker, started_s = _cpu_s(java), _cpu_s(server), time.monotonic()
            rows = _sums(frame.load("revive"))
            took_s, cpu_s = time.monotonic() - started_s, _cpu_s(java) - before
            served_s = _cpu_s(server) - broker
            assert rows == records // topics.REVIVE_QUEUES * topics.REVIVE_QUEUES, rows
            print(
                f"{records:>10,} records: {rows / cpu_s:>11,.0f} a CPU-second of Spark "
                f"({cpu_s:.1f} s; broker and proxy {served_s:.1f} s), "
                f"{rows / took_s:>11,.0f} a second",
                flush=True,
            )


def _sums(frame: Any) -> int:
    """The number of rows, out of an aggregate over all of them."""
    from pyspark.sql import functions as F

    rows = F.count("*").alias("rows")
    if "log_ms" not in frame.columns:
        return int(frame.agg(rows).collect()[0]["rows"])
    found = frame.groupBy("group").agg(rows, F.max("log_ms"), F.avg("messages"))
    return sum(row["rows"] for row in found.collect())


def _cpu_s(process: int) -> float:
    """User and system time of a process and of all that came from it, ended or not."""
    total = 0.0
    for one in [process, *_children(process)]:
        try:
            with open(f"/proc/{one}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / _TICK
    return total


def _children(process: int) -> list[int]:
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == process:
                found += [int(entry), *_children(int(entry))]
    return found


if __name__ == "__main__":
    sys.exit(main())
