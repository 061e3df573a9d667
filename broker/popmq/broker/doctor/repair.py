"""Doing what the doctor proposed: first save everything, durable, then cut."""

import fcntl
import json
import os
from dataclasses import asdict

from popmq.broker.doctor.examination import Diagnosis
from popmq.broker.doctor.finding import (
    Finding,
    RealSavingDisk,
    Repair,
    RequiredAction,
    SavingDisk,
)
from popmq.common.errors import ConfigError


def chosen(diagnosis: Diagnosis, *, accept_loss: bool) -> list[Finding]:
    """Findings that a repair acts on. None at all while a loss is not accepted: any other
    repair could take away what now keeps a start from cutting."""
    findings = [finding for finding in diagnosis.findings if finding.repairs]
    if any(finding.need is RequiredAction.ACCEPT_LOSS for finding in findings) and not accept_loss:
        return []
    return findings if diagnosis.summary.starts_after_repair else []


def repair(data: str, findings: list[Finding], disk: SavingDisk | None = None) -> str:
    """Do it; returns the repair folder's name. After a crash anywhere in it, do it again."""
    disk = disk or RealSavingDisk()
    number = 1
    while disk.exists(f"{data}/repair-{number}"):
        number += 1
    name = f"repair-{number}"
    room = f"{data}/{name}"
    repairs: list[Repair] = []
    for finding in findings:
        repairs += (step for step in finding.repairs if step not in repairs)
    disk.make_folder(room)
    _write_report(disk, f"{room}/findings.json", findings)
    for step in repairs:
        step.save(disk, data, room)
    disk.sync_folder(data)
    for step in repairs:
        step.cut(disk, data)
    return name


def _write_report(disk: SavingDisk, path: str, findings: list[Finding]) -> None:
    report = [as_fields(finding) for finding in findings]
    file = disk.open(path, create=True)
    try:
        file.write(json.dumps(report, indent=1).encode(), 0)
        file.sync()
    finally:
        file.close()


def as_fields(finding: Finding) -> dict[str, object]:
    fields: dict[str, object] = asdict(finding)
    fields["need"] = finding.need.value
    fields["repairs"] = [str(step) for step in finding.repairs]
    return fields


class ReadLock:
    """The data folder's flock without a byte written; ConfigError names who has it."""

    def __init__(self, data: str) -> None:
        self._fd = -1
        if not os.path.isdir(data):
            raise ConfigError(f"{data} is no data directory (--data)")
        try:
            self._fd = os.open(f"{data}/lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # no process ever used it
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._fd, 32).decode(errors="replace").strip() or "unknown"
            self.release()
            raise ConfigError(
                f"data directory {data} is used by process {owner}: stop it first"
            ) from None

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
