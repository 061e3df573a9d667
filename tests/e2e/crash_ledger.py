"""The books of a run in which the broker is killed: outcomes may be unknown, never wrong.

Pure.  Three promises are checked (D2): a message whose send said OK is received; a message
whose acknowledgement said OK is not seen again; every further delivery has a cause that the
client can name.  All times are milliseconds of one monotonic clock, the client's.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from e2e.ledger import render


class Ack(StrEnum):
    """What became of a delivery's acknowledgement."""

    NONE = "none"  # never sent, on purpose
    OK = "ok"
    REFUSED = "refused"  # the handle was no good any more
    UNKNOWN = "unknown"  # no reply, or an error


class Cause(StrEnum):
    """Why a client saw a message once more."""

    EXPIRED = "expired"
    ACK_LOST = "ack lost"
    SEND_UNKNOWN = "send unknown"
    NONE = "no cause"


@dataclass(slots=True)
class Seen:
    """One delivery; the receive was called at `asked_ms` and handed it over at `received_ms`."""

    message_id: str
    attempt: int
    asked_ms: float
    received_ms: float
    ack: Ack = Ack.NONE
    ack_ms: float = 0.0  # when the outcome was known


@dataclass(slots=True)
class CrashReport:
    """`faults` is empty when all promises were kept."""

    sent_ok: int = 0
    sent_unknown: int = 0
    unknown_appeared: int = 0
    received: int = 0
    deliveries: int = 0
    acked: int = 0
    lost: int = 0
    acked_seen_again: int = 0
    unsettled: int = 0
    early: int = 0
    replies_lost: int = 0
    duplicates: Counter[Cause] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def table(self) -> str:
        figures = {
            "sent OK": self.sent_ok,
            "send outcome unknown": self.sent_unknown,
            "... of these received": self.unknown_appeared,
            "received": self.received,
            "deliveries": self.deliveries,
            "acked": self.acked,
            "sent OK and lost": self.lost,
            "acked and seen again": self.acked_seen_again,
            "came back early": self.early,
            "left unacknowledged": self.unsettled,
            "receive replies lost": self.replies_lost,
            **{f"duplicates: {cause}": self.duplicates[cause] for cause in Cause},
        }
        lines = render([[name, str(value)] for name, value in figures.items()])
        return "\n".join([*lines, *self.faults[:20]])


def check_crashes(
    *,
    sent_ok: Iterable[str],
    sent_unknown: Iterable[str],
    deliveries: Iterable[Seen],
    invisible_ms: int,
) -> CrashReport:
    """Judge a finished run: everything was drained before."""
    ok, unknown = set(sent_ok), set(sent_unknown)
    by_id: dict[str, list[Seen]] = defaultdict(list)
    for delivery in sorted(deliveries, key=lambda seen: seen.received_ms):
        by_id[delivery.message_id].append(delivery)
    report = CrashReport(
        sent_ok=len(ok),
        sent_unknown=len(unknown),
        unknown_appeared=len(unknown & by_id.keys()),
        received=len(by_id),
        deliveries=sum(map(len, by_id.values())),
        acked=sum(any(item.ack is Ack.OK for item in seen) for seen in by_id.values()),
        lost=len(ok - by_id.keys()),
    )
    report.faults += [f"{name} was sent and never received" for name in sorted(ok - by_id.keys())]
    report.faults += [
        f"{name} was received and never sent" for name in sorted(by_id.keys() - ok - unknown)
    ]
    for message_id, seen in by_id.items():
        _check_message(report, seen, invisible_ms, sent_unknown=message_id in unknown)
    return report


def _check_message(
    report: CrashReport, seen: Sequence[Seen], invisible_ms: int, *, sent_unknown: bool
) -> None:
    name = seen[0].message_id
    # An attempt that nobody saw went out in a reply that a crash cut off.
    attempts = {delivery.attempt for delivery in seen}
    report.replies_lost += max(attempts) - len(attempts)
    for i, again in enumerate(seen[1:], start=1):
        before = seen[i - 1]
        if any(
            delivery.ack is Ack.OK and delivery.ack_ms < again.asked_ms for delivery in seen[:i]
        ):
            report.acked_seen_again += 1
            report.faults.append(f"{name}: acknowledged, and seen again as {_shown(again)}")
        cause = _cause(seen[:i], again, invisible_ms, sent_unknown)
        report.duplicates[cause] += 1
        if cause is Cause.NONE:
            report.faults.append(f"{name}: {_shown(again)} after {_shown(before)} has no cause")
        if cause is not Cause.SEND_UNKNOWN and again.received_ms < before.asked_ms + invisible_ms:
            report.early += 1
            report.faults.append(f"{name}: {_shown(again)} came early after {_shown(before)}")
    if all(delivery.ack in (Ack.NONE, Ack.REFUSED) for delivery in seen):
        report.unsettled += 1
        report.faults.append(f"{name}: never acknowledged, and never came back to be")


def _cause(before: Sequence[Seen], again: Seen, invisible_ms: int, sent_unknown: bool) -> Cause:
    last = before[-1]
    if again.attempt <= max(delivery.attempt for delivery in before):
        # The same attempt twice: the message was stored twice, which only a send without an
        # answer excuses.
        return Cause.SEND_UNKNOWN if sent_unknown else Cause.NONE
    if any(delivery.ack is Ack.OK for delivery in before):
        return Cause.NONE
    if last.ack is Ack.UNKNOWN:
        return Cause.ACK_LOST
    if last.ack is Ack.REFUSED and last.ack_ms < last.asked_ms + invisible_ms:
        return Cause.NONE
    return Cause.EXPIRED


def _shown(delivery: Seen) -> str:
    return (
        f"attempt {delivery.attempt} (asked {delivery.asked_ms:.0f}, "
        f"received {delivery.received_ms:.0f}, ack {delivery.ack} at {delivery.ack_ms:.0f})"
    )
