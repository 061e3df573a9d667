"""What is wrong with a history of the nemesis. Knows popmq by its public API only.

A history is a file of JSON lines, one for each call of a client and for each fault. Times are
milliseconds of the one wall clock of the machine: `begun` before the call left, `ended` after
its answer. An outcome is "ok", "refused" (the server said no) or "unknown" (perhaps it was done).

    {"op": "send", "topic", "id", "key", "number", "due_ms", "begun", "ended", "outcome"}
    {"op": "recall", "id", ...}
    {"op": "rollback", "id", ...}              of a transaction; else its send ends with the commit
    {"op": "receive", "group", "topic", "invisible_ms", "whole", "messages": [[id, attempt], ..]}
    {"op": "ack", "group", "id", ...}         with the newest handle
    {"op": "change", "group", "id", "invisible_ms", ...}
    {"op": "stale", "group", "id", ...}       an ack with a handle that a change superseded
    {"op": "reset", "group", ...}              to the oldest message, without retries
    {"op": "redrive", "group", ...}
    {"op": "recreate", "topic" or "group", "deleted", "creating", ...}  times of the two answers:
        `begun` is when the deletion was asked for, `ended` when the creation was OK
    {"op": "clocks", "slack_ms"}               how far the clocks of the cluster may be wrong
    {"op": "owner away", ...}                  a proxy or a broker group may not have reached the
                                               owner of the topics
    {"op": "fault", "what", "crash": whether a process was killed, ...}
    {"op": "group", "group", "topic", "fifo", "buffered"} and {"op": "lag", "left"}

    python -m e2e.nemesis.checker FILE        checks a kept history again (from tests/)
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from e2e.ledger import render

Op = dict[str, Any]
NEVER = 1 << 62
SLACK_MS = 2  # two clocks are read to whole milliseconds
LATE_MS = 20_000  # a command without an answer may still be done so much later
Window = tuple[int, int]  # from when to when something may have been done


# What is allowed is counted, and no more of it than this share of the messages that were received
# (of those that were sent, for the last two), and as many beside.
FEW = 40
OUT_OF_REACH = "of a topic or group made again, its owner out of reach"
BOUNDS = {
    "early, a crash of a buffered group": 0.05,
    "early, the reply before broke off": 0.05,
    "early, beside a reset or a new group": 0.25,
    "again after an ack, beside a reset or a new group": 0.75,
    "early, an earlier answer came late": 0.05,
    # docs/reference/metadata.md, "What is guaranteed"
    OUT_OF_REACH: 0.25,
    "sent beside the deletion of its topic": 0.25,
    "sent without an answer, and never received": 0.75,
}


@dataclass(slots=True)
class Verdict:
    faults: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    out_of_order: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    uncommitted: list[str] = field(default_factory=list)
    # Of a topic that was deleted: received in its successor, or sent where there was none.
    old_topic: list[str] = field(default_factory=list)
    allowed: Counter[str] = field(default_factory=Counter)  # of BOUNDS
    lag_left: int = -1

    @property
    def violations(self) -> list[str]:
        named = {
            "lost": self.lost,
            "repeated after ack": self.repeated,
            "early": self.early,
            "out of order": self.out_of_order,
            "stale handle accepted": self.stale,
            "without a commit": self.uncommitted,
            "of a deleted topic": self.old_topic,
        }
        result = [f"{what}: {text}" for what, texts in named.items() for text in texts]
        received = self.operations["receive, messages"]
        sent = sum(self.operations[f"send {outcome}"] for outcome in ("ok", "unknown"))
        for what, share in BOUNDS.items():
            most = FEW + int(share * (sent if what.startswith("sent") else received))
            if self.allowed[what] > most:
                result.append(f"allowed too often: {what}: {self.allowed[what]}, at most {most}")
        return result + ([f"lag left: {self.lag_left}"] if self.lag_left else [])

    def table(self) -> str:
        rows = [["", ""]]
        rows += [[f"fault: {what}", str(count)] for what, count in sorted(self.faults.items())]
        rows += [
            [f"calls: {what}", f"{count:,}"] for what, count in sorted(self.operations.items())
        ]
        rows += [
            ["lost", str(len(self.lost))],
            ["repeated after ack", str(len(self.repeated))],
            ["early", str(len(self.early))],
            ["out of order", str(len(self.out_of_order))],
            ["stale handle accepted", str(len(self.stale))],
            ["without a commit", str(len(self.uncommitted))],
            ["of a deleted topic", str(len(self.old_topic))],
            ["lag left", str(self.lag_left)],
        ]
        rows += [[f"allowed: {what}", f"{self.allowed[what]:,}"] for what in BOUNDS]
        return "\n".join(render(rows)[1:])


def check(history: Iterable[Op]) -> Verdict:
    verdict, by_op = Verdict(), defaultdict[str, list[Op]](list)
    for item in sorted(history, key=lambda entry: entry.get("ended", 0)):
        by_op[item["op"]].append(item)
        if "outcome" in item:
            verdict.operations[f"{item['op']} {item['outcome']}"] += 1
        elif item["op"] == "receive":
            verdict.operations["receive, messages"] += len(item["messages"])
    verdict.faults.update(entry["what"] for entry in by_op["fault"])
    crashes = [(entry["begun"], entry["ended"]) for entry in by_op["fault"] if entry["crash"]]
    slack_ms = max([entry["slack_ms"] for entry in by_op["clocks"]], default=SLACK_MS)
    recalled = {entry["id"] for entry in by_op["recall"]}
    rolled_back = {entry["id"] for entry in by_op["rollback"]}
    _check_topics(verdict, by_op)
    for group in by_op["group"]:
        mine = [entry for op in ("receive", "ack", "change") for entry in by_op[op]]
        mine = [entry for entry in mine if entry["group"] == group["group"]]
        lives = [item for item in by_op["recreate"] if item.get("topic") == group["topic"]]
        sends = [entry for entry in by_op["send"] if entry["topic"] == group["topic"]]
        acks = defaultdict[str, list[Op]](list)
        for item in mine:
            if item["op"] == "ack" and item["outcome"] != "refused":
                acks[item["id"]].append(item)
        # A group that was deleted and made again begins at the oldest message, as after a reset.
        resets = [
            entry
            for entry in (*by_op["reset"], *by_op["recreate"])
            if entry.get("group") == group["group"]
        ]
        of_this_life = [
            entry for entry in sends if all(entry["begun"] > life["ended"] for life in lives)
        ]
        # What a proxy and a broker group took for the old topic or group, of which they could not
        # know that it is gone, is gone with it.
        made_again = [
            item for item in (*lives, *by_op["recreate"]) if item in lives or item in resets
        ]
        away = [
            (max(begin, item["begun"]), end)
            for begin, end in _spans(by_op["owner away"])
            for item in made_again
            if end > item["begun"]
        ]
        _check_lost(verdict, group, of_this_life, acks, recalled, resets, away)
        _check_deliveries(
            verdict, group, sends, mine, acks, crashes, _windows(resets), away, slack_ms=slack_ms
        )
        if group["fifo"]:
            _check_order(verdict, group, sends, mine, acks)
    for item in by_op["receive"]:
        for message, _ in item["messages"]:
            if message in rolled_back:
                verdict.uncommitted.append(f"{item['group']} {message} at {item['ended']}")
    away = _spans(by_op["owner away"])
    of_groups = [item["group"] for item in by_op["recreate"] if "group" in item]
    for item in by_op["stale"]:
        if item["outcome"] != "ok":
            continue
        if item["group"] in of_groups and _any_between(away, item["begun"], item["ended"]):
            verdict.allowed[OUT_OF_REACH] += 1
        else:
            verdict.stale.append(f"{item['group']} {item['id']} at {item['ended']}")
    if by_op["lag"]:
        verdict.lag_left = by_op["lag"][-1]["left"]
    return verdict


def _check_topics(verdict: Verdict, by_op: dict[str, list[Op]]) -> None:
    """What is sent after a topic's creation belongs to it, what was sent before its deletion to the
    old one, which never shows again. Between the two answers there is no topic."""
    away = _spans(by_op["owner away"])
    sends = {entry["id"]: entry for entry in by_op["send"]}
    received = {message for item in by_op["receive"] for message, _ in item["messages"]}
    for send in sends.values():
        unknown = send["outcome"] == "unknown" and send["id"] not in received
        verdict.allowed["sent without an answer, and never received"] += unknown
    for life in by_op["recreate"]:
        topic = life.get("topic")
        if topic is None:
            continue
        for send in sends.values():
            if send["topic"] != topic or send["outcome"] != "ok":
                continue
            what = f"{send['id']}, sent OK at {send['ended']}"
            if send["begun"] > life["deleted"] and send["ended"] < life["creating"]:
                if _any_between(away, life["begun"], send["ended"]):
                    verdict.allowed[OUT_OF_REACH] += 1
                else:
                    verdict.old_topic.append(f"{what}, no {topic} from {life['deleted']} on")
            elif send["begun"] < life["ended"] and send["ended"] > life["begun"]:
                verdict.allowed["sent beside the deletion of its topic"] += 1
        for item in by_op["receive"]:
            if item["topic"] != topic or item["begun"] < life["ended"]:
                continue
            for message, _ in item["messages"]:
                if sends[message]["ended"] >= life["begun"]:
                    continue
                if _any_between(away, life["begun"], item["ended"]):
                    verdict.allowed[OUT_OF_REACH] += 1
                else:
                    what = f"{message} received at {item['ended']}"
                    verdict.old_topic.append(f"{what}, deleted with {topic} at {life['deleted']}")


def _spans(ops: Sequence[Op]) -> list[Window]:
    return [(item["begun"], item["ended"]) for item in ops]


def _windows(resets: Sequence[Op]) -> list[Window]:
    return [
        (item["begun"], item["ended"] + (0 if item["outcome"] == "ok" else LATE_MS))
        for item in resets
    ]


def _any_between(windows: Sequence[Window], since_ms: int, until_ms: int) -> bool:
    return any(begin <= until_ms and end >= since_ms for begin, end in windows)


def _check_lost(
    verdict: Verdict,
    group: Op,
    sends: Sequence[Op],
    acks: dict[str, list[Op]],
    recalled: set[str],
    resets: Sequence[Op],
    away: Sequence[Window],
) -> None:
    """Each message that was sent OK and not recalled is acked by the end; if it was there when the
    group was reset, after that."""
    for send in sends:
        if send["outcome"] != "ok" or send["id"] in recalled:
            continue
        done_ms = [entry["begun"] for entry in resets if entry["outcome"] == "ok"]
        since_ms = max([at for at in done_ms if at > send["ended"]], default=0)
        if any(ack["ended"] >= since_ms for ack in acks.get(send["id"], ())):
            continue
        if _any_between(away, send["begun"], send["ended"]):
            verdict.allowed[OUT_OF_REACH] += 1
        else:
            verdict.lost.append(f"{group['group']} {send['id']}, sent OK at {send['ended']}")


class _Step(IntEnum):
    """In this order at one moment."""

    RECEIVED = 0
    CHANGING = 1
    CHANGED = 2


def _in_order(mine: Sequence[Op]) -> list[tuple[int, _Step, Op]]:
    """What a group's receives and changes did, by its time."""
    steps = [(item["ended"], _Step.RECEIVED, item) for item in mine if item["op"] == "receive"]
    for item in (entry for entry in mine if entry["op"] == "change"):
        steps.append((item["begun"], _Step.CHANGING, item))
        if item["outcome"] == "ok":
            steps.append((item["ended"], _Step.CHANGED, item))
    return sorted(steps, key=lambda step: step[:2])


def _check_deliveries(
    verdict: Verdict,
    group: Op,
    sends: Sequence[Op],
    mine: Sequence[Op],
    acks: dict[str, list[Op]],
    crashes: Sequence[Window],
    resets: Sequence[Window],
    away: Sequence[Window],
    *,
    slack_ms: int,
) -> None:
    """Nothing comes behind an ack that was OK, before its delivery time, or before the invisible
    time of its last delivery is over; unless the group was reset meanwhile."""
    due_ms = {entry["id"]: entry["due_ms"] for entry in sends}
    # Not before the first; when the delivery began; whether its reply came whole.
    until_ms: dict[str, tuple[int, int, bool]] = {}
    newest: dict[str, tuple[int, int]] = {}  # attempt of the last delivery, and when it came
    for _, step, item in _in_order(mine):
        if step is not _Step.RECEIVED:
            before_ms, since_ms, whole = until_ms.get(item["id"], (0, item["begun"], True))
            if since_ms > item["begun"]:
                continue  # of an earlier delivery
            new_ms = item["begun"] + item["invisible_ms"]
            # Until its answer comes, and without one, the earlier of both times counts: a proxy
            # that tries a change again is refused if the first try was done.
            earliest_ms = new_ms if step is _Step.CHANGED else min(before_ms, new_ms)
            until_ms[item["id"]] = (earliest_ms, since_ms, whole)
            continue
        for message, attempt in item["messages"]:
            what = f"{group['group']} {message}, attempt {attempt}, received at {item['ended']}"
            before = [
                ack
                for ack in acks.get(message, ())
                if ack["outcome"] == "ok" and ack["ended"] < item["begun"]
            ]
            final = [a for a in before if not _any_between(resets, a["begun"], item["ended"])]
            if final and any(_any_between(away, a["begun"], a["ended"]) for a in final):
                verdict.allowed[OUT_OF_REACH] += 1
            elif final:
                verdict.repeated.append(f"{what}, acked OK at {final[0]['ended']}")
            elif before:
                verdict.allowed["again after an ack, beside a reset or a new group"] += 1
            if item["ended"] + slack_ms < due_ms.get(message, 0):
                verdict.early.append(f"{what}, due at {due_ms[message]}")
            before_ms, since_ms, whole = until_ms.get(message, (0, 0, True))
            last_attempt, last_ms = newest.get(message, (0, 0))
            anew = _any_between(resets, item["begun"], item["ended"])
            anew = anew or _any_between(crashes, item["begun"], item["ended"])
            if item["begun"] < last_ms and attempt < last_attempt + anew:
                # The answer to an earlier receive, or to one of an earlier group or master.
                verdict.allowed["early, an earlier answer came late"] += 1
                continue
            newest[message] = attempt, item["ended"]
            if item["ended"] + slack_ms < before_ms:
                # A reply that broke off may have been undone: what came of it may come again at
                # once. A crash returns what a group with buffered check points holds.
                if not whole:
                    verdict.allowed["early, the reply before broke off"] += 1
                elif _any_between(resets, since_ms, item["ended"]):
                    verdict.allowed["early, beside a reset or a new group"] += 1
                elif group["buffered"] and _any_between(crashes, since_ms, item["ended"]):
                    verdict.allowed["early, a crash of a buffered group"] += 1
                else:
                    verdict.early.append(f"{what}, invisible until {before_ms}")
            until_ms[message] = (
                item["begun"] + item["invisible_ms"],
                item["begun"],
                item["whole"],
            )


def _check_order(
    verdict: Verdict, group: Op, sends: Sequence[Op], mine: Sequence[Op], acks: dict[str, list[Op]]
) -> None:
    """A message comes when all of its key that were sent OK before it are acked, or in front of it
    in the same reply."""
    place = {entry["id"]: (entry["key"], entry["number"]) for entry in sends}
    asked_ms = {
        message: min(entry["begun"] for entry in several) for message, several in acks.items()
    }
    sent = defaultdict[str, list[tuple[int, str]]](list)  # of each key, in order
    for send in sends:
        if send["outcome"] == "ok":
            sent[send["key"]].append((send["number"], send["id"]))
    over = Counter[str]()  # how many of a key are acked without a gap
    for item in (entry for entry in mine if entry["op"] == "receive"):
        earlier: set[str] = set()
        for message, _ in item["messages"]:
            key, number = place[message]
            line = sent[key]
            while (
                over[key] < len(line) and asked_ms.get(line[over[key]][1], NEVER) <= item["ended"]
            ):
                over[key] += 1
            for before, other in line[over[key] :]:
                if before >= number:
                    break
                if other not in earlier and asked_ms.get(other, NEVER) > item["ended"]:
                    text = f"{group['group']} {message} at {item['ended']} before {other}"
                    verdict.out_of_order.append(text)
            earlier.add(message)


def read(path: Path) -> list[Op]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(arguments: Sequence[str]) -> int:
    verdict = check(read(Path(arguments[0])))
    print(verdict.table())
    print("\n".join(verdict.violations[:50]))
    return 1 if verdict.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
