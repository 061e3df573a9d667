"""The books of an end-to-end run: what was sent, what each group got, and what is wrong with it.

Pure.  A group owes every message exactly once, and the chosen tenth exactly twice: the second
time with attempt 2, not before its time and not much after it, and with every field as sent.
Anything else is a fault, with a sentence that says which message and by how much.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from e2e.payloads import Fields


class Cause(StrEnum):
    """Why a message was delivered once more."""

    EXPIRED = "expired"  # it was not acknowledged within its invisible time
    NACK = "nack"  # the listener failed
    CRASH = "crash"  # its acknowledgement was sent and got no OK
    UNKNOWN = "unknown"  # it had been acknowledged


@dataclass(frozen=True, slots=True)
class Sent:
    """A message with an OK; one born time for each request that carried it."""

    k: int
    message_id: str
    receipt_id: str
    born_ms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a consumer saw. `acked`: it meant to acknowledge. Times are wall clock.

    `delivered_ms` is the server's own time in the reply, `received_ms` is when the client
    handed the message over, `settled_ms` is when its listener returned.
    """

    message_id: str
    attempt: int
    fields: Fields
    born_ms: int
    corrupted: bool
    delivered_ms: int
    received_ms: int
    settled_ms: int
    acked: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """When an unacknowledged message of this group is due again.

    cause EXPIRED: `wait_ms` is the invisible time, counted from the pop, whose time the reply
    tells; two clocks are read to whole milliseconds, hence the slack against "early".
    cause NACK: `wait_ms` is the back-off, counted from the listener's failure.
    `client_ms_per_mib` is what the client itself needs to hand over a body, and no lateness.
    """

    group: str
    cause: Cause
    wait_ms: int
    late_ms: int = 500
    early_slack_ms: int = 2
    client_ms_per_mib: int = 0

    def earliest_ms(self, first: Delivery) -> int:
        if self.cause is Cause.NACK:
            return first.settled_ms + self.wait_ms
        return first.delivered_ms + self.wait_ms - self.early_slack_ms

    def latest_ms(self, first: Delivery) -> int:
        own_ms = self.client_ms_per_mib * first.fields.size // 2**20
        return self.due_ms(first) + self.late_ms + own_ms

    def due_ms(self, first: Delivery) -> int:
        since = first.settled_ms if self.cause is Cause.NACK else first.received_ms
        return since + self.wait_ms


@dataclass(slots=True)
class Report:
    """One group's result; `faults` is empty when the group got what it is owed."""

    group: str
    sent: int = 0
    deliveries: int = 0
    once: int = 0
    twice: int = 0
    lost: int = 0
    duplicated: int = 0
    altered: int = 0
    early: int = 0
    late: int = 0
    causes: Counter[Cause] = field(default_factory=Counter)
    lateness_ms: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, int | str]:
        ordered = sorted(self.lateness_ms)
        return {
            "group": self.group,
            "sent": self.sent,
            "deliveries": self.deliveries,
            "once": self.once,
            "twice": self.twice,
            "lost": self.lost,
            "duplicated": self.duplicated,
            "altered": self.altered,
            "early": self.early,
            "late": self.late,
            **{f"by {cause}": self.causes[cause] for cause in Cause},
            "late p50 ms": ordered[len(ordered) // 2] if ordered else "-",
            "late max ms": ordered[-1] if ordered else "-",
        }


def check_group(
    rule: Rule,
    sent: Sequence[Sent],
    deliveries: Iterable[Delivery],
    *,
    expected: Callable[[int], Fields],
    comes_back: Callable[[int], bool],
    ack_failed: frozenset[tuple[str, int]] = frozenset(),
) -> Report:
    """Compare one group's deliveries with what was sent.

    `ack_failed` holds (message id, attempt) of acknowledgements that got no OK.
    """
    report = Report(rule.group, sent=len(sent))
    by_id: dict[str, list[Delivery]] = defaultdict(list)
    for delivery in sorted(deliveries, key=lambda item: (item.received_ms, item.attempt)):
        by_id[delivery.message_id].append(delivery)
        report.deliveries += 1
    for message in sent:
        if message.receipt_id != message.message_id:
            report.faults.append(f"message {message.k}: sent under another id than its receipt's")
        seen = by_id.pop(message.message_id, [])
        _check_count(report, rule, message, seen, comes_back(message.k), ack_failed)
        _check_return(report, rule, message, seen[:2], comes_back(message.k))
        for delivery in seen:
            _check_fields(report, message, delivery, expected(message.k))
    for message_id, seen in by_id.items():
        report.duplicated += len(seen)
        report.faults.append(f"{message_id} was delivered {len(seen)} times and never sent")
    return report


def table(reports: Sequence[Report]) -> str:
    """One column a group, one row a figure; the faults below, at most ten of each group."""
    columns = [report.as_dict() for report in reports]
    rows = [[name, *(str(column[name]) for column in columns)] for name in columns[0]]
    lines = render(rows)
    for report in reports:
        lines += [f"{report.group}: {fault}" for fault in report.faults[:10]]
        if len(report.faults) > 10:
            lines.append(f"{report.group}: ... and {len(report.faults) - 10} more")
    return "\n".join(lines)


def render(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned text: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _check_count(
    report: Report,
    rule: Rule,
    message: Sent,
    seen: Sequence[Delivery],
    returns: bool,
    ack_failed: frozenset[tuple[str, int]],
) -> None:
    owed = 2 if returns else 1
    report.once += len(seen) == 1
    report.twice += len(seen) == 2
    if len(seen) < owed:
        report.lost += 1
        report.faults.append(f"message {message.k}: delivered {len(seen)} of {owed} times")
    for before, again in pairwise(seen):
        report.causes[_cause(rule, before, ack_failed)] += 1
        if again.attempt != before.attempt + 1:
            report.faults.append(
                f"message {message.k}: attempt {again.attempt} follows attempt {before.attempt}"
            )
    if seen and seen[0].attempt != 1:
        report.faults.append(f"message {message.k}: first seen as attempt {seen[0].attempt}")
    for before in seen[owed - 1 : -1]:
        report.duplicated += 1
        cause = _cause(rule, before, ack_failed)
        report.faults.append(f"message {message.k}: delivered once more than owed ({cause})")


def _cause(rule: Rule, before: Delivery, ack_failed: frozenset[tuple[str, int]]) -> Cause:
    if not before.acked:
        return rule.cause
    if (before.message_id, before.attempt) in ack_failed:
        return Cause.CRASH
    return Cause.UNKNOWN


def _check_return(
    report: Report, rule: Rule, message: Sent, seen: Sequence[Delivery], returns: bool
) -> None:
    if not returns or len(seen) < 2:
        return
    first, second = seen
    too_early_ms = rule.earliest_ms(first) - second.received_ms
    lateness_ms = second.received_ms - rule.due_ms(first)
    report.lateness_ms.append(lateness_ms)
    if too_early_ms > 0:
        report.early += 1
        report.faults.append(f"message {message.k}: came back {too_early_ms} ms early")
    if second.received_ms > rule.latest_ms(first):
        report.late += 1
        report.faults.append(f"message {message.k}: came back {lateness_ms} ms late")


def _check_fields(report: Report, message: Sent, delivery: Delivery, expected: Fields) -> None:
    wrong = [
        f"{name} {was!r} became {now!r}"
        for name, was, now in (
            ("size", expected.size, delivery.fields.size),
            ("sha256", expected.sha256, delivery.fields.sha256),
            ("keys", expected.keys, delivery.fields.keys),
            ("tag", expected.tag, delivery.fields.tag),
            *_property_pairs(expected.properties, delivery.fields.properties),
        )
        if was != now
    ]
    if delivery.born_ms not in message.born_ms:
        wrong.append(f"born_ms {message.born_ms} became {delivery.born_ms}")
    if delivery.corrupted:
        wrong.append("the client found the body's digest wrong")
    if wrong:
        report.altered += 1
        report.faults.append(f"message {message.k}, attempt {delivery.attempt}: {'; '.join(wrong)}")


def _property_pairs(
    was: Mapping[str, str], now: Mapping[str, str]
) -> list[tuple[str, str | None, str | None]]:
    names = sorted(was.keys() | now.keys())
    return [(f"property {name}", was.get(name), now.get(name)) for name in names]
