"""The books of a group that several consumers share while some of them are killed.

Pure.  Every message is acknowledged or a dead letter at the end; what was acknowledged is never
seen again; each further delivery has a cause that the consumers' journals can name; and in an
ordered group a message is first seen when its predecessor is over.  All times are milliseconds
of the one wall clock that consumers and broker share.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from e2e.ledger import render

OK = 20_000
# The only refusal that a consumer may meet: its time was over, and the message is on its way.
INVALID_RECEIPT_HANDLE = 40_013


class Op(StrEnum):
    ACK = "ack"
    NACK = "nack"  # a change of the invisible duration
    REJECT = "reject"  # to the dead letters at once


class Cause(StrEnum):
    """Why a message was seen once more."""

    EXPIRED = "expired"
    NACK = "nack"
    CRASH = "crash of a consumer"
    ACK_UNANSWERED = "ack unanswered"
    NONE = "no cause"


@dataclass(frozen=True, slots=True)
class Sent:
    """`number` counts the messages of one key; without keys it counts all."""

    message_id: str
    key: str
    number: int


@dataclass(frozen=True, slots=True)
class Consumer:
    name: str
    push: bool
    killed_ms: int | None = None

    def dead_by(self, at_ms: int) -> bool:
        return self.killed_ms is not None and self.killed_ms <= at_ms


@dataclass(slots=True)
class Call:
    """`code` is None when no answer was seen; `wait_ms` is what a nack asked for."""

    op: Op
    begun_ms: int
    wait_ms: int = 0
    code: int | None = None


@dataclass(slots=True)
class Seen:
    """One delivery; `receive` and `place` say in which reply, and where in it, it came.

    A push consumer's is noted when its listener is called, which has no reply to tell.
    """

    message_id: str
    attempt: int
    consumer: Consumer
    receive: int | None
    place: int
    asked_ms: int
    seen_ms: int
    calls: list[Call] = field(default_factory=list)

    def has(self, op: Op, *codes: int | None) -> bool:
        return any(call.op is op and call.code in codes for call in self.calls)


@dataclass(frozen=True, slots=True)
class Letter:
    message_id: str
    attempts: int
    dead_ms: int


@dataclass(frozen=True, slots=True)
class Rules:
    max_attempts: int
    invisible_ms: int
    back_off_ms: int
    ordered: bool


@dataclass(slots=True)
class SharedReport:
    """`faults` is empty when all promises were kept."""

    sent: int = 0
    deliveries: int = 0
    acked: int = 0
    acked_unanswered: int = 0
    dead: int = 0
    lost: int = 0
    unknown: int = 0
    keys: int = 0
    order_checked: int = 0
    refused: int = 0
    unseen: int = 0
    duplicates: Counter[Cause] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def table(self) -> str:
        figures: dict[str, int] = {
            "sent OK": self.sent,
            "deliveries": self.deliveries,
            "acked": self.acked,
            "... of these the answer died with the consumer": self.acked_unanswered,
            "dead-lettered": self.dead,
            "calls refused, their time was over": self.refused,
            "attempts that a killed consumer never got to": self.unseen,
            **{f"duplicates: {cause}": self.duplicates[cause] for cause in Cause},
        }
        if self.keys:
            figures |= {"keys": self.keys, "pairs in order": self.order_checked}
        lines = render([[name, str(value)] for name, value in figures.items()])
        return "\n".join([*lines, f"lost {self.lost}, unknown {self.unknown}", *self.faults[:20]])


def unsettled(sent: Iterable[Sent], seen: Iterable[Seen], letters: Iterable[Letter]) -> list[str]:
    """Ids that no consumer saw acknowledged and that are no dead letters: ask the broker."""
    settled = {delivery.message_id for delivery in seen if delivery.has(Op.ACK, OK)}
    settled |= {letter.message_id for letter in letters}
    return sorted({message.message_id for message in sent} - settled)


def check_shared(
    *,
    sent: Sequence[Sent],
    seen: Iterable[Seen],
    letters: Sequence[Letter],
    explained: Mapping[str, str],
    rules: Rules,
    kills_ms: Sequence[int],
) -> SharedReport:
    """Judge a finished run; `explained` is what the broker says of the `unsettled`."""
    by_id: dict[str, list[Seen]] = defaultdict(list)
    for delivery in sorted(seen, key=lambda item: (item.attempt, item.seen_ms)):
        by_id[delivery.message_id].append(delivery)
    dead = {letter.message_id: letter for letter in letters}
    report = SharedReport(sent=len(sent), dead=len(dead))
    ids = {message.message_id for message in sent}
    for name, strangers in {
        "sent twice": [
            message_id
            for message_id, count in Counter(m.message_id for m in sent).items()
            if count > 1
        ],
        "seen and never sent": by_id.keys() - ids,
        "a dead letter and never sent": dead.keys() - ids,
        "a dead letter twice": [
            message_id
            for message_id, count in Counter(x.message_id for x in letters).items()
            if count > 1
        ],
    }.items():
        report.faults += [f"{stranger}: {name}" for stranger in sorted(strangers)]
    for message in sent:
        one_id = message.message_id
        deliveries = by_id.get(one_id, [])
        _check_end(report, one_id, deliveries, dead.get(one_id), explained.get(one_id))
        _check_deliveries(report, deliveries, rules, kills_ms)
        _check_letter(report, deliveries, dead.get(one_id), rules, kills_ms)
    if rules.ordered:
        _check_order(report, sent, by_id, dead)
    return report


def _check_end(
    report: SharedReport,
    message_id: str,
    seen: Sequence[Seen],
    letter: Letter | None,
    explained: str | None,
) -> None:
    acked = any(delivery.has(Op.ACK, OK) for delivery in seen)
    if acked and letter is not None:
        report.faults.append(f"{message_id}: acknowledged, and a dead letter")
    report.acked += acked
    if acked or letter is not None:
        return
    if explained == "ACKED" and seen and seen[-1].has(Op.ACK, None):
        report.acked += 1
        report.acked_unanswered += 1
    elif not seen:
        report.lost += 1
        report.faults.append(f"{message_id}: sent and never seen; the broker says {explained}")
    else:
        report.unknown += 1
        report.faults.append(
            f"{message_id}: neither acknowledged nor a dead letter; the broker says"
            f" {explained}; last seen as {_shown(seen[-1])}"
        )


def _check_deliveries(
    report: SharedReport, seen: Sequence[Seen], rules: Rules, kills_ms: Sequence[int]
) -> None:
    report.deliveries += len(seen)
    for delivery in seen:
        for call in delivery.calls:
            report.refused += call.code == INVALID_RECEIPT_HANDLE
            if call.code not in (OK, INVALID_RECEIPT_HANDLE, None):
                report.faults.append(f"{delivery.message_id}: {call.op} was answered {call.code}")
            if call.code is None and delivery.consumer.killed_ms is None:
                report.faults.append(
                    f"{delivery.message_id}: {call.op} of a living consumer unanswered"
                )
        if not 1 <= delivery.attempt <= rules.max_attempts:
            report.faults.append(
                f"{delivery.message_id}: {_shown(delivery)} of {rules.max_attempts}"
            )
    for before, again in pairwise([None, *seen]):
        assert again is not None
        _check_unseen(report, before, again.attempt - 1, again.seen_ms, again.message_id, kills_ms)
        if before is None:
            continue
        cause = _cause(before, again, rules)
        report.duplicates[cause] += 1
        if cause is Cause.NONE:
            report.faults.append(
                f"{again.message_id}: {_shown(again)} after {_shown(before)} has no cause,"
                " or came early"
            )


def _check_unseen(
    report: SharedReport,
    before: Seen | None,
    up_to: int,
    until_ms: int,
    message_id: str,
    kills_ms: Sequence[int],
) -> None:
    """Attempts after `before` that nobody noted: each died with a consumer of its own."""
    after, from_ms = (before.attempt, before.seen_ms) if before is not None else (0, 0)
    unseen = up_to - after
    report.unseen += max(0, unseen)
    if unseen > sum(from_ms <= at_ms <= until_ms for at_ms in kills_ms):
        report.faults.append(
            f"{message_id}: of the attempts {after + 1} to {up_to} nobody knows, and not so many"
            " consumers were killed meanwhile"
        )


def _cause(before: Seen, again: Seen, rules: Rules) -> Cause:
    if again.attempt == before.attempt or before.has(Op.ACK, OK) or before.has(Op.REJECT, OK):
        return Cause.NONE
    if again.attempt > before.attempt + 1:
        return Cause.CRASH
    killed = before.consumer.dead_by(again.seen_ms)
    if before.has(Op.NACK, OK):
        return Cause.NACK if again.seen_ms >= _nacked_until_ms(before, rules) else Cause.NONE
    if before.has(Op.ACK, None):
        return Cause.ACK_UNANSWERED
    if before.consumer.push or before.has(Op.NACK, None):
        return Cause.CRASH if killed else Cause.NONE
    if again.seen_ms < before.asked_ms + rules.invisible_ms:
        return Cause.NONE
    return Cause.CRASH if killed and not before.calls else Cause.EXPIRED


def _nacked_until_ms(delivery: Seen, rules: Rules) -> int:
    """A push consumer's nack is raised to the group's back-off, whatever the client sends."""
    floor_ms = rules.back_off_ms if delivery.consumer.push else 0
    return min(
        call.begun_ms + max(call.wait_ms, floor_ms)
        for call in delivery.calls
        if call.op is Op.NACK and call.code == OK
    )


def _check_letter(
    report: SharedReport,
    seen: Sequence[Seen],
    letter: Letter | None,
    rules: Rules,
    kills_ms: Sequence[int],
) -> None:
    if letter is None:
        return
    name = f"{letter.message_id}: a dead letter after attempt {letter.attempts}"
    last = seen[-1] if seen else None
    rejected = last is not None and last.has(Op.REJECT, OK, None)
    if letter.attempts != rules.max_attempts and not rejected:
        report.faults.append(f"{name} of {rules.max_attempts}, and nobody rejected it")
    if last is not None and last.attempt > letter.attempts:
        report.faults.append(f"{name}, and seen as {_shown(last)}")
    _check_unseen(report, last, letter.attempts, letter.dead_ms, letter.message_id, kills_ms)


def _check_order(
    report: SharedReport,
    sent: Sequence[Sent],
    by_id: Mapping[str, Sequence[Seen]],
    dead: Mapping[str, Letter],
) -> None:
    keys: dict[str, list[Sent]] = defaultdict(list)
    for message in sorted(sent, key=lambda message: message.number):
        keys[message.key].append(message)
    report.keys = len(keys)
    for key, messages in keys.items():
        # A message that nobody saw cannot be out of order, but those on both sides of it can.
        for place, later in enumerate(messages):
            first = _first(by_id.get(later.message_id, []))
            if first is None or place == 0:
                continue
            earlier = messages[place - 1]
            report.order_checked += 1
            fault = _order_fault(
                by_id.get(earlier.message_id, []), dead.get(earlier.message_id), first
            )
            if fault:
                report.faults.append(
                    f"{key}: number {later.number} was first seen as {_shown(first)} {fault}"
                    f" number {earlier.number}"
                )


def _order_fault(earlier: Sequence[Seen], letter: Letter | None, first: Seen) -> str:
    """What is wrong with the first delivery of a message, given all of its predecessor's."""
    together = any(
        item.consumer == first.consumer
        and item.receive is not None
        and item.receive == first.receive
        and item.place < first.place
        for item in earlier
    )
    if together:
        return ""
    ended = letter is not None and letter.dead_ms <= first.seen_ms
    for delivery in earlier:
        ended |= any(
            call.op is not Op.NACK and call.code in (OK, None) and call.begun_ms <= first.seen_ms
            for call in delivery.calls
        )
    if not ended:
        return "before the end of"
    if any(item.seen_ms > first.seen_ms for item in earlier):
        return "before the last delivery of"
    return ""


def _first(seen: Sequence[Seen]) -> Seen | None:
    return min(seen, key=lambda delivery: (delivery.seen_ms, delivery.attempt), default=None)


def _shown(delivery: Seen) -> str:
    calls = ", ".join(f"{call.op} {call.code} at {call.begun_ms}" for call in delivery.calls)
    return (
        f"attempt {delivery.attempt} at {delivery.consumer.name} (asked {delivery.asked_ms}, "
        f"seen {delivery.seen_ms}, {calls or 'no calls'})"
    )
