"""The doctor's look at the small files (checkpoint, abort, snapshots) and at the log's order."""

from dataclasses import dataclass, field

from popmq.broker.doctor.finding import Finding, MoveFiles, RequiredAction
from popmq.broker.doctor.finding_texts import missing_head_finding
from popmq.broker.doctor.log_walk import Record
from popmq.broker.log.store_checkpoint import StoreCheckpoint, read_checkpoint
from popmq.broker.persistence.abort_file import owner
from popmq.broker.persistence.snapshot import read_snapshot, snapshot_names
from popmq.common.disk import Disk

_REPORTED = 20  # findings of one kind; a broken clock would make one per record


@dataclass(slots=True)
class OrderCheck:
    """Epochs, log time and queue offsets only grow; `take` sees every intact record."""

    checkpoint: StoreCheckpoint | None
    findings: list[Finding] = field(default_factory=list)
    at_boundary: bool = False  # a record starts or ends where the checkpoint says
    epoch: int = 0
    _log_ms: int = 0
    _following: dict[tuple[int, int], int] = field(default_factory=dict)

    def take(self, record: Record, path: str, after_hole: bool) -> None:
        """`after_hole`: records are missing before this one, so offsets may jump."""
        header = record.header
        if header.epoch < self.epoch:
            self._add(path, header.position, f"epoch {header.epoch} follows epoch {self.epoch}")
        if header.log_ms < self._log_ms:
            self._add(path, header.position, f"log time {header.log_ms} follows {self._log_ms}")
        if record.has_unit:
            key = (header.topic_id, header.queue_id)
            expected = self._following.get(key, header.queue_offset)
            jumps = header.queue_offset > expected and after_hole
            if header.queue_offset != expected and not jumps:
                self._add(
                    path,
                    header.position,
                    f"offset {header.queue_offset} of queue {key[1]} of topic id {key[0]} "
                    f"follows {expected - 1}",
                )
            self._following[key] = header.queue_offset + 1
        self.epoch = max(self.epoch, header.epoch)
        self._log_ms = max(self._log_ms, header.log_ms)
        if self.checkpoint is not None:
            self.at_boundary |= self.checkpoint.position in (header.position, header.end)

    def _add(self, path: str, position: int, detail: str) -> None:
        if len(self.findings) < _REPORTED:
            self.findings.append(
                Finding(
                    "log out of order",
                    path,
                    position,
                    detail,
                    "the broker starts, but its tables may be wrong",
                    "keep a copy of the folder and report it: intact records are never written "
                    "in such an order",
                    RequiredAction.HUMAN,
                )
            )


def small_file_findings(
    disk: Disk, data: str, order: OrderCheck, *, log_start: int, log_end: int
) -> list[Finding]:
    """What the checkpoint and the abort file say about themselves."""
    checkpoint = order.checkpoint
    findings = []
    if checkpoint is None:
        findings += _no_checkpoint(disk, data, log_end)
    elif checkpoint.log_start < log_start:
        findings.append(missing_head_finding(checkpoint.log_start, log_start))
    elif log_start < checkpoint.position < log_end and not order.at_boundary:
        findings.append(
            Finding(
                "wrong checkpoint",
                "checkpoint",
                checkpoint.position,
                "no record starts or ends at this position",
                "a start trusts index units that were never checked",
                "remove it: the next start rebuilds the index",
                RequiredAction.REPAIR,
                (MoveFiles(("checkpoint",)),),
            )
        )
    if disk.exists(f"{data}/checkpoint.new"):
        findings.append(_leftover("checkpoint.new"))
    if disk.exists(f"{data}/abort"):
        findings.append(
            Finding(
                "not stopped cleanly",
                "abort",
                0,
                f"process {owner(disk, data) or 'unknown'} was killed, or lost its power",
                "the next start reads what the checkpoint does not vouch for",
                "nothing to do",
                RequiredAction.NOTHING,
            )
        )
    elif checkpoint is not None and checkpoint.position < log_end:
        findings.append(
            Finding(
                "no abort file",
                "abort",
                0,
                f"the log goes on to {log_end}, behind the checkpoint at {checkpoint.position}, "
                "so its broker was not stopped cleanly",
                "the next start reports a clean stop; nothing depends on it",
                "nothing to do",
                RequiredAction.NOTHING,
            )
        )
    return findings


def snapshot_findings(disk: Disk, data: str, *, log_end: int) -> list[Finding]:
    findings = []
    finished = snapshot_names(disk, f"{data}/snapshot")
    for name in disk.names(f"{data}/snapshot"):
        path = f"snapshot/{name}"
        if name not in finished:
            findings.append(_leftover(path))
            continue
        snapshot = read_snapshot(disk, f"{data}/{path}")
        if snapshot is None or snapshot.head.position != int(name):
            findings.append(
                Finding(
                    "damaged snapshot",
                    path,
                    int(name),
                    "it is not whole, its crc does not match, or its name is another position",
                    "a start takes an older one, or reads the whole log",
                    "remove it",
                    RequiredAction.NOTHING if snapshot is None else RequiredAction.REPAIR,
                    (MoveFiles((path,)),),
                )
            )
    return findings


def snapshots_behind(disk: Disk, data: str, position: int) -> list[str]:
    """Snapshots of a state that a log which ends at `position` does not reach."""
    names = snapshot_names(disk, f"{data}/snapshot")
    return [f"snapshot/{name}" for name in names if int(name) > position]


def newest_snapshot(disk: Disk, data: str) -> int:
    """Position of the newest snapshot that can be read; 0 when there is none."""
    for name in reversed(snapshot_names(disk, f"{data}/snapshot")):
        if read_snapshot(disk, f"{data}/snapshot/{name}") is not None:
            return int(name)
    return 0


def load_checkpoint(disk: Disk, data: str) -> StoreCheckpoint | None:
    return read_checkpoint(disk, f"{data}/checkpoint")


def _no_checkpoint(disk: Disk, data: str, log_end: int) -> list[Finding]:
    consequence = "the next start rebuilds the index from the log"
    if disk.exists(f"{data}/checkpoint"):
        return [
            Finding(
                "damaged checkpoint",
                "checkpoint",
                0,
                "its magic, its version or its crc is wrong",
                consequence,
                "remove it",
                RequiredAction.NOTHING,
                (MoveFiles(("checkpoint",)),),
            )
        ]
    if not log_end:
        return []
    missing = "none was written yet, or it was deleted"
    return [
        Finding(
            "no checkpoint",
            "checkpoint",
            0,
            missing,
            consequence,
            "nothing",
            RequiredAction.NOTHING,
        )
    ]


def _leftover(path: str) -> Finding:
    return Finding(
        "leftover",
        path,
        0,
        "a file that was being written when the process ended",
        "nobody reads it",
        "remove it",
        RequiredAction.NOTHING,
        (MoveFiles((path,)),),
    )
