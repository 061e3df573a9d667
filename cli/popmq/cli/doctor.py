"""`popmq doctor`: looks at a data directory offline, says what a start would do, and mends it.

Exit status: 0 healthy or mended by a normal start, 1 something needs a human or --repair.
"""

import argparse
import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, replace

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.pop_check_point import RECORD_SIZE
from popmq.broker.doctor import examination as doctor
from popmq.broker.doctor.examination import Diagnosis, Summary
from popmq.broker.doctor.finding import Finding, Repair, RequiredAction
from popmq.broker.doctor.rehearsal import RehearsalResult
from popmq.broker.doctor.rehearsal_disk import RehearsalDisk
from popmq.broker.doctor.repair import ReadLock, as_fields, chosen, repair
from popmq.broker.ha.identity import FILE_NAME as IDENTITY
from popmq.broker.ha.identity import stored_cluster
from popmq.broker.node.broker_process import DataLock
from popmq.broker.store.message_store import StoreThreads
from popmq.cli import doctor_diff
from popmq.cli.messages import Subparsers
from popmq.cli.metadata import columns
from popmq.common.clock import SystemClock
from popmq.common.errors import ConfigError, StoreDamaged
from popmq.common.quantities import parse_size
from popmq.common.settings.settings import (
    ClusterSettings,
    MessageSettings,
    Settings,
    StoreSettings,
    environment,
    load_settings,
)
from popmq.common.step_loop import InlineFlusher


def add_parsers(subparsers: Subparsers, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "doctor", help="check a data directory while no broker runs on it, and repair it"
    )
    doctor_diff.add_parser(parser.add_subparsers(metavar="COMMAND"))
    parser.add_argument("--data", metavar="DIR", help="the broker's data directory")
    parser.add_argument("--repair", action="store_true", help="do what the findings propose")
    parser.add_argument(
        "--accept-loss", action="store_true", help="with --repair: give up intact records too"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings")
    parser.add_argument(
        "--segment-bytes", type=size_argument, default=0, metavar="SIZE", help="if no file tells it"
    )
    parser.set_defaults(run=run_doctor)


def size_argument(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_doctor(args: argparse.Namespace) -> int:
    if args.data is None:
        raise ConfigError("name the broker's data directory (--data), or two snapshots (diff A B)")
    if args.accept_loss and not args.repair:
        raise ConfigError("--accept-loss means something with --repair only")
    read_lock = ReadLock(args.data)
    read_lock.release()
    if not os.path.isdir(f"{args.data}/commitlog"):
        raise ConfigError(
            f"{args.data} holds no store: it has no folder commitlog" + _brokers_below(args.data)
        )
    lock = DataLock(args.data) if args.repair else ReadLock(args.data)
    try:
        return _run(args)
    finally:
        lock.release()


def _brokers_below(data: str) -> str:
    """Where the stores are, in the folder of a cluster of `popmq up`."""
    names = sorted(os.listdir(data)) if os.path.isdir(data) else []
    stores = [f"{data}/{name}" for name in names if os.path.isdir(f"{data}/{name}/commitlog")]
    return f". Its brokers' stores: {', '.join(stores)}" if stores else ""


def examine(data: str, *, segment_bytes: int = 0) -> Diagnosis:
    """Look at a data directory that no process uses, with this build's broker to rehearse."""
    disk, damage = RehearsalDisk(), ""
    try:
        cluster = stored_cluster(disk, f"{data}/{IDENTITY}")
    except StoreDamaged as error:
        cluster, damage = "", str(error)
    finally:
        disk.close()
    diagnosis = doctor.examine(
        data,
        rehearse,
        revive_unit_bytes=RECORD_SIZE,
        segment_bytes=segment_bytes,
        cluster=cluster,
    )
    return _without_identity(diagnosis, damage) if damage else diagnosis


def _without_identity(diagnosis: Diagnosis, damage: str) -> Diagnosis:
    """The rehearsed start is that of the store; the broker around it reads the identity first."""
    finding = Finding(
        "damaged identity",
        IDENTITY,
        0,
        "it is no identity, or its crc does not match",
        "the broker refuses to start",
        damage,
        RequiredAction.HUMAN,
    )
    summary = replace(diagnosis.summary, starts=False, starts_after_repair=False)
    return replace(diagnosis, findings=(finding, *diagnosis.findings), summary=summary)


def rehearse(
    data: str, repairs: Sequence[Repair], *, segment_bytes: int, cluster: str
) -> RehearsalResult:
    """A start of the broker in memory; see `Rehearse`."""
    disk = RehearsalDisk()
    for one in repairs:
        one.cut(disk, data)
    settings = Settings(
        cluster=ClusterSettings(name=cluster),
        broker=replace(Settings().broker, data=data),
        # One short segment says little of the real size; more than one says it exactly.
        store=StoreSettings(segment_bytes=max(segment_bytes, 16 << 10)),
        message=MessageSettings(max_body_bytes=1, max_properties_bytes=0),
    )
    broker = Broker(
        settings,
        disk=disk,
        clock=SystemClock(),
        # Nothing is handed to the flusher: what the start itself appends stays out of the index.
        threads=StoreThreads.of_one(InlineFlusher(), lambda work: None),
        rng=random.Random(0),
    )
    try:
        broker.start()
    except Exception as error:  # whatever a start raises ends the process
        return RehearsalResult(disk, None, " ".join(f"{error or type(error).__name__}".split()))
    return RehearsalResult(
        disk,
        broker.store,
        topics={topic.id: topic.name for topic in broker.registry.topics()},
        groups=sum(1 for _ in broker.registry.groups()),
        check_points=len(broker.table),
        in_flight=broker.table.in_flight,
    )


def _run(args: argparse.Namespace) -> int:
    diagnosis = _examine(args)
    _print(diagnosis, as_json=args.json)
    if not args.repair:
        return 0 if diagnosis.healthy else 1
    findings = chosen(diagnosis, accept_loss=args.accept_loss)
    if not findings:
        _say(args, "repaired", "nothing", _why_nothing(diagnosis))
        return 0 if diagnosis.healthy else 1
    for finding in findings:
        for one in finding.repairs:
            _say(args, "doing", str(one), f"{finding.what}: {one}")
    folder = repair(args.data, findings)
    _say(args, "repaired", folder, f"repaired; what was taken away is in {args.data}/{folder}")
    after = _examine(args)
    _print(after, as_json=args.json)
    return 0 if after.healthy else 1


def _examine(args: argparse.Namespace) -> Diagnosis:
    loaded = load_settings(args.config, environment(), {})
    segment_bytes = args.segment_bytes
    if not segment_bytes and loaded.sources["store.segment_bytes"] != "default":
        segment_bytes = loaded.settings.store.segment_bytes
    return examine(args.data, segment_bytes=segment_bytes)


def _why_nothing(diagnosis: Diagnosis) -> str:
    if diagnosis.healthy:
        return "nothing to repair"
    if any(finding.need is RequiredAction.ACCEPT_LOSS for finding in diagnosis.findings):
        return "nothing repaired: this gives up intact records, which needs --accept-loss"
    if diagnosis.summary.starts:
        return "nothing repaired: a broker starts as it is; what is left needs a person"
    return "nothing repaired: no repair here would let a broker start"


def _say(args: argparse.Namespace, key: str, value: str, text: str) -> None:
    print(json.dumps({key: value}) if args.json else text)


def _print(diagnosis: Diagnosis, *, as_json: bool) -> None:
    if as_json:
        for finding in diagnosis.findings:
            print(json.dumps(as_fields(finding)))
        print(json.dumps({"healthy": diagnosis.healthy, **asdict(diagnosis.summary)}))
        return
    for finding in diagnosis.findings:
        print(columns((finding.what.upper(), ""), _rows(finding)) + "\n")
    print(columns(("STORE", diagnosis.data), _summary_rows(diagnosis.summary)))
    print(_verdict(diagnosis))


def _rows(finding: Finding) -> Sequence[tuple[str, object]]:
    return (
        ("file", finding.path),
        ("position", finding.position),
        ("found", finding.detail),
        ("consequence", finding.consequence),
        ("proposal", finding.proposal),
        ("needs", finding.need.value),
        *(("--repair", str(one)) for one in finding.repairs),
    )


def _summary_rows(summary: Summary) -> Sequence[tuple[str, object]]:
    after = "yes" if summary.starts_after_repair else "no"
    starts = "yes" if summary.starts else f"no; after the repair: {after}"
    return (
        ("cluster", summary.cluster or "not named yet: that of the next start"),
        ("log", f"{summary.log_start} to {summary.log_end}, {summary.records} records"),
        ("starts", starts),
        ("topics", summary.topics),
        ("groups", summary.groups),
        ("check points", f"{summary.check_points}, {summary.in_flight} messages in flight"),
        *((f"  {name}", f"{number} messages") for name, number in summary.messages.items()),
    )


def _verdict(diagnosis: Diagnosis) -> str:
    if not diagnosis.findings:
        return "healthy"
    if diagnosis.healthy:
        return "healthy: a normal start mends what is noted above"
    needs = sorted(
        {one.need.value for one in diagnosis.findings if one.need is not RequiredAction.NOTHING}
    )
    return f"needs {', '.join(needs)}"
