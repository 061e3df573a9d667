"""`popmq doctor`: looks at a data directory offline, says what a start would do, and mends it.

Exit status: 0 healthy or mended by a normal start, 1 an administrator or --repair is needed.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import asdict, replace

import click

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.pop_check_point import RECORD_SIZE
from popmq.broker.diagnostics.lag import met_pairs
from popmq.broker.doctor import examination
from popmq.broker.doctor.examination import Diagnosis, Summary
from popmq.broker.doctor.finding import Finding, MoveFiles, Repair, RequiredAction
from popmq.broker.doctor.rehearsal import RehearsalResult
from popmq.broker.doctor.rehearsal_disk import RehearsalDisk
from popmq.broker.doctor.repair import ReadLock, as_fields, chosen, repair
from popmq.broker.ha.epoch_file import FILE_NAME as EPOCHS
from popmq.broker.ha.epoch_file import EpochFile
from popmq.broker.ha.identity import FILE_NAME as IDENTITY
from popmq.broker.ha.identity import stored_cluster
from popmq.broker.node.broker_process import DataLock
from popmq.broker.store.message_store import StoreThreads
from popmq.cli.local.doctor_diff import diff
from popmq.cli.terminal.arguments import SIZE
from popmq.cli.terminal.command_line import Args, command, flag, group, option
from popmq.cli.terminal.output import columns, print_rows
from popmq.common.clock import SystemClock
from popmq.common.disk import RealDisk
from popmq.common.errors import ConfigError, StoreDamaged
from popmq.common.settings.cluster_settings import ClusterSettings
from popmq.common.settings.settings import (
    MessageSettings,
    Settings,
    StoreSettings,
    environment,
    load_settings,
)
from popmq.common.step_loop import InlineFlusher
from popmq.common.topics import loses_order

LEAST_FILES = 16  # that a disk can still make


def run_doctor(args: Args) -> int:
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


def _check(args: Args) -> None:
    if args.data is None:
        raise click.UsageError(
            "name the broker's data directory (--data), or two snapshots (diff A B)"
        )
    if args.accept_loss and not args.repair:
        raise click.UsageError("--accept-loss means something with --repair only")


def _brokers_below(data: str) -> str:
    """Where the stores are, in the folder of a cluster of `popmq up`."""
    names = sorted(os.listdir(data)) if os.path.isdir(data) else []
    stores = [f"{data}/{name}" for name in names if os.path.isdir(f"{data}/{name}/commitlog")]
    return f". Its brokers' stores: {', '.join(stores)}" if stores else ""


def examine(data: str, *, segment_bytes: int = 0) -> Diagnosis:
    """Look at a data directory that no process uses, with this build's broker to rehearse."""
    disk, cluster = RehearsalDisk(), ""
    damaged: list[Finding] = []
    try:
        cluster = stored_cluster(disk, f"{data}/{IDENTITY}")
    except StoreDamaged as error:
        damaged.append(_damaged_identity(str(error)))
    try:
        EpochFile(disk, f"{data}/{EPOCHS}")
    except (StoreDamaged, ValueError) as error:
        damaged.append(_damaged_epochs(str(error)))
    finally:
        disk.close()
    diagnosis = examination.examine(
        data,
        rehearse,
        revive_unit_bytes=RECORD_SIZE,
        segment_bytes=segment_bytes,
        cluster=cluster,
    )
    diagnosis = replace(diagnosis, findings=(*diagnosis.findings, *_no_inodes(data)))
    if not damaged:
        return diagnosis
    # The rehearsed start is that of the store; the broker around it reads these files first.
    repairable = all(finding.repairs for finding in damaged)
    after = repairable and diagnosis.summary.starts_after_repair
    summary = replace(diagnosis.summary, starts=False, starts_after_repair=after)
    return replace(diagnosis, findings=(*damaged, *diagnosis.findings), summary=summary)


def _no_inodes(data: str) -> Sequence[Finding]:
    free = RealDisk().free_files(data)
    if free >= LEAST_FILES:
        return ()
    finding = Finding(
        "hardly any inode left",
        "",
        0,
        f"the disk can make {free} files more (df -i), and a start needs some",
        "a broker does not start, or refuses sends",
        "remove other files, or make the file system with more inodes",
        RequiredAction.HUMAN,
    )
    return (finding,)


def _damaged_identity(damage: str) -> Finding:
    return Finding(
        "damaged identity",
        IDENTITY,
        0,
        "it is no identity, or its crc does not match",
        "the broker refuses to start",
        damage,
        RequiredAction.HUMAN,
    )


def _damaged_epochs(damage: str) -> Finding:
    return Finding(
        "damaged epochs",
        EPOCHS,
        0,
        f"it is no list of epochs, or its crc does not match: {damage.split(':')[0]}",
        "the broker refuses to start",
        "move it away: a broker without replicas goes on, its log counts as one epoch; a replica "
        "may copy its whole log again",
        RequiredAction.REPAIR,
        (MoveFiles((EPOCHS,)),),
    )


def rehearse(
    data: str, repairs: Sequence[Repair], *, segment_bytes: int, cluster: str
) -> RehearsalResult:
    """A start of the broker in memory; see `Rehearse`."""
    disk = RehearsalDisk()
    for item in repairs:
        item.cut(disk, data)
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
        unordered=_unordered(broker),
    )


def _unordered(broker: Broker) -> dict[str, list[str]]:
    findings: dict[str, list[str]] = {}
    for pair in met_pairs(broker.registry, broker.table):
        if pair is not None and loses_order(pair.group, pair.topic):
            findings.setdefault(pair.group.name, []).append(pair.topic.name)
    return findings


def _run(args: Args) -> int:
    diagnosis = _examine(args)
    rows, lines = _rows_of(diagnosis), _lines_of(diagnosis)
    if args.repair:
        findings = chosen(diagnosis, accept_loss=args.accept_loss)
        if findings:
            for finding in findings:
                rows += [{"doing": str(item)} for item in finding.repairs]
                lines += [f"{finding.what}: {item}" for item in finding.repairs]
            folder = repair(args.data, findings)
            diagnosis = _examine(args)
            rows += [{"repaired": folder}, *_rows_of(diagnosis)]
            moved = f"repaired; what was taken away is in {args.data}/{folder}"
            lines += [moved, *_lines_of(diagnosis)]
        else:
            rows.append({"repaired": "nothing"})
            lines.append(_why_nothing(diagnosis))
    print_rows(args, rows, lines)
    return 0 if diagnosis.healthy else 1


def _examine(args: Args) -> Diagnosis:
    loaded = load_settings(args.config, environment(), {})
    segment_bytes = args.segment_bytes
    if not segment_bytes and loaded.sources["store.segment_bytes"] != "default":
        segment_bytes = loaded.settings.store.segment_bytes
    return examine(args.data, segment_bytes=segment_bytes)


def _why_nothing(diagnosis: Diagnosis) -> str:
    if diagnosis.healthy:
        return "nothing to repair"
    if any(finding.need is RequiredAction.ACCEPT_LOSS for finding in diagnosis.findings):
        return "nothing repaired: what is proposed gives up records, which needs --accept-loss"
    if diagnosis.summary.starts:
        return "nothing repaired: a broker starts as it is; what is left needs a person"
    return "nothing repaired: no repair here would let a broker start"


def _rows_of(diagnosis: Diagnosis) -> list[dict[str, object]]:
    summary = {"healthy": diagnosis.healthy, **asdict(diagnosis.summary)}
    return [*(dict(as_fields(finding)) for finding in diagnosis.findings), summary]


def _lines_of(diagnosis: Diagnosis) -> list[str]:
    lines = [
        columns((finding.what.upper(), ""), _rows(finding)) + "\n" for finding in diagnosis.findings
    ]
    lines.append(columns(("STORE", diagnosis.data), _summary_rows(diagnosis.summary)))
    return [*lines, _verdict(diagnosis)]


def _rows(finding: Finding) -> Sequence[tuple[str, object]]:
    return (
        ("file", finding.path),
        ("position", finding.position),
        ("found", finding.detail),
        ("consequence", finding.consequence),
        ("proposal", finding.proposal),
        ("needs", finding.need.value),
        *(("--repair", str(item)) for item in finding.repairs),
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
        {
            finding.need.value
            for finding in diagnosis.findings
            if finding.need is not RequiredAction.NOTHING
        }
    )
    return f"needs {', '.join(needs)}"


doctor = group(
    "doctor",
    [diff],
    help="Check a data directory while no broker runs on it, and repair it.",
    alone=command(
        "doctor",
        run_doctor,
        option("--data", metavar="DIR", help="The broker's data directory."),
        flag("--repair", help="Do what the findings propose."),
        flag("--accept-loss", help="With --repair: give up intact records too."),
        option("--config", metavar="FILE", help="A TOML file of settings."),
        option(
            "--segment-bytes", type=SIZE, default=0, metavar="SIZE", help="If no file tells it."
        ),
        help="Check a data directory while no broker runs on it, and repair it.",
        examples=(
            "popmq doctor --data ./popmq-data",
            "popmq doctor --data ./popmq-data --repair",
            "popmq doctor diff ./a/snapshot ./b/snapshot",
        ),
        connects=False,
        check=_check,
    ),
    folder_option="--data",
)
