"""What the doctor says about the commoner findings."""

from collections.abc import Sequence

from popmq.broker.doctor.finding import (
    AcceptStart,
    Finding,
    MoveFiles,
    RepairPadding,
    RequiredAction,
)
from popmq.broker.doctor.log_walk import DamagedRange, Padding
from popmq.common.topics import unordered_text

MENDED = "rebuilt from the log, at the start or when they are read"
COPY = "bring the folder back from a copy"


def hole_finding(path: str, hole: DamagedRange) -> Finding:
    return Finding(
        "damage below a snapshot",
        path,
        hole.position,
        f"{hole.reason}; intact again from {hole.end}",
        f"the broker starts; what these {hole.end - hole.position} bytes held is lost, all other "
        "messages are delivered",
        f"{COPY} if they matter",
        RequiredAction.HUMAN,
    )


def unordered_finding(group: str, names: Sequence[str]) -> Finding:
    return Finding(
        "a group that does not keep the order of a topic",
        "",
        0,
        f"group {group} is normal, and reads {', '.join(names)}, where messages have an order",
        "a message that comes back is delivered behind later ones",
        unordered_text(group, names),
        RequiredAction.NOTHING,
    )


def lost_tail_finding(path: str, position: int, kept_end: int, reason: str) -> Finding:
    return Finding(
        "damage below a snapshot",
        path,
        position,
        f"{reason}; a snapshot states the log up to {kept_end}",
        f"the broker starts; what these {kept_end - position} bytes held is lost",
        f"{COPY} if they matter",
        RequiredAction.HUMAN,
    )


def slave_tail_finding(path: str, position: int, reason: str, records: int) -> Finding:
    return Finding(
        "torn tail of a slave",
        path,
        position,
        f"{reason}; {records} intact records behind it were written before it was on the disk",
        "a start cuts them, and copies them again from here on: its master has them",
        "nothing to do",
        RequiredAction.NOTHING,
    )


def padding_finding(padding: Padding) -> Finding:
    return Finding(
        "damaged padding",
        padding.path,
        padding.at,
        f"its size says {padding.wrong_size}, the segment leaves {padding.size}",
        "a start ends the log here and cuts what is behind, or refuses",
        "write the only possible size",
        RequiredAction.REPAIR,
        (RepairPadding(padding.path, padding.at, padding.size),),
    )


def snapshot_ahead_finding(path: str, log_end: int) -> Finding:
    return Finding(
        "snapshot ahead of the log",
        path,
        int(path[-20:]),
        f"the log ends at {log_end}",
        "a start passes it over, until the log has grown beyond it; then its state is wrong",
        "remove it",
        RequiredAction.REPAIR,
        (MoveFiles((path,)),),
    )


def short_finding(queues: int, missing: int) -> Finding:
    return Finding(
        "index behind the log",
        "consumequeue, system",
        0,
        f"{missing} units of {queues} queues were not written yet",
        "start enters them from the log",
        "nothing to do",
        RequiredAction.NOTHING,
    )


def stranger_finding(folder: str, paths: list[str]) -> Finding:
    return Finding(
        "queue of no topic",
        folder,
        0,
        f"{len(paths)} files of a topic that does not exist",
        "they are never read",
        "move them away",
        RequiredAction.NOTHING,
        (MoveFiles(tuple(paths)),),
    )


def missing_head_finding(known_start: int, start: int) -> Finding:
    return Finding(
        "oldest segment missing",
        f"commitlog/{known_start:020d}",
        known_start,
        f"the checkpoint says that the log began here, and its first segment begins at {start}: "
        "retention did not delete what was before",
        "the broker refuses to start",
        f"{COPY}; or go on without it with --repair --accept-loss: gives up what these "
        f"{start - known_start} bytes held",
        RequiredAction.ACCEPT_LOSS,
        (AcceptStart(start),),
    )


def refusal_finding(refusal: str) -> Finding:
    return Finding(
        "start refused", ".", 0, refusal, "the broker refuses to start", COPY, RequiredAction.HUMAN
    )
