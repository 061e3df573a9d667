"""`popmq status` and `popmq top`: how the cluster is, on a page, once or again and again."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from popmq.cli.brokers import list_lines
from popmq.cli.client import CallFailed, CallRefused, Client
from popmq.cli.consumer_offsets import joined, total_of
from popmq.cli.resource_names import client_of
from popmq.cli.terminal.arguments import POSITIVE_DURATION
from popmq.cli.terminal.command_line import Args, command, option
from popmq.cli.terminal.live_screen import watch
from popmq.cli.terminal.output import (
    Row,
    coloured,
    columns,
    folded,
    format_age,
    format_due,
    heading,
    print_rows,
)
from popmq.common.errors import Code
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import controller_pb2 as pb

SHOWN_NOTES = 3  # of `status`, which fits 24 lines where little is wrong
SHOWN_GROUPS = 5  # of `status`; `lag` shows all
BAD_VERDICTS = ("STUCK", "STOPPED", "FAILING")
OLD_MS = 60_000  # a message that is ready for longer is worth a look
GROUP_HEADER = ("GROUP", "TOPIC", "LAG", "READY", "IN-FLIGHT", "RETRIES", "OLDEST", "DEAD")
TOPIC_HEADER = ("TOPIC", "TYPE", "GROUPS", "LAG", "READY", "IN-FLIGHT", "TIMERS")


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What one look at the cluster saw."""

    brokers: pb.ListReplicasReply
    lag: admin.LagReply
    timers: admin.ForecastTimersReply
    topics: Sequence[admin.Topic]
    unknown: Mapping[str, str] = field(default_factory=dict)  # why a part could not be read
    hidden: Mapping[str, str] = field(default_factory=dict)  # why the user may not see a part

    @classmethod
    def of(cls, client: Client) -> "ClusterView":
        """All is asked for at once: a broker that is silent is waited for once.

        Raises CallFailed when the proxy does not answer, and CallRefused when it does not know the
        caller."""
        with ThreadPoolExecutor() as pool:
            brokers = pool.submit(
                client.call_admin, admin.ListBrokersRequest(), admin.ListBrokersReply
            )
            lag = pool.submit(client.call_admin, admin.LagRequest(), admin.LagReply)
            timers = pool.submit(
                client.call_admin, admin.ForecastTimersRequest(), admin.ForecastTimersReply
            )
            topics = pool.submit(client.topics, system=False)
        unknown: dict[str, str] = {}
        hidden: dict[str, str] = {}
        replicas = pb.ListReplicasReply()
        try:
            replicas = brokers.result().found
        except CallRefused as error:  # mostly no controller answers the proxy
            _missing(error, unknown, hidden)["brokers"] = error.reason
        view: dict[str, Any] = {
            "lag": admin.LagReply(),
            "timers": admin.ForecastTimersReply(),
            "topics": [],
        }
        for name, part in (("lag", lag), ("timers", timers), ("topics", topics)):
            try:
                view[name] = part.result()
            except CallRefused as error:
                _missing(error, unknown, hidden)[name] = error.reason
            except CallFailed as error:
                unknown[name] = str(error)
        return cls(replicas, **view, unknown=unknown, hidden=hidden)

    @property
    def troubles(self) -> list[str]:
        """What is wrong, the worst first; empty when all is well."""
        problems = [
            f"{state.group}: {state.trouble}" for state in self.brokers.groups if state.trouble
        ]
        for state in self.brokers.groups:
            if not state.trouble and not any(map(_leads, state.members)):
                problems.append(f"{state.group}: no master")
            problems += [
                f"{state.group}: {member.broker.node or state.group} is dead"
                for member in state.members
                if not member.alive
            ]
            problems += [
                f"{state.group}: {member.broker.node}: {member.shortage}"
                for member in state.members
                if member.shortage
            ]
            problems += [
                f"{state.group}: {member.broker.node} has other tables than the master"
                for member in state.members
                if member.tables_differ_at
            ]
        if not self.brokers.groups and not self.unknown and "brokers" not in self.hidden:
            problems.append("no broker group is known")
        problems += [f"not everything is known: {part}" for part in self._incomplete()]
        return problems

    def _incomplete(self) -> Iterator[str]:
        for reply in (self.lag, self.timers):
            if reply.incomplete:
                yield reply.incomplete
        yield from dict.fromkeys(self.unknown.values())

    @property
    def notes(self) -> list[str]:
        """What a person may want to look at, though nothing is broken."""
        notes = [f"not shown: {reason}" for reason in dict.fromkeys(self.hidden.values())]
        for row in self.lags():
            age_ms = self.age_ms(row)
            bad = f" is {row.verdict}" if row.verdict in BAD_VERDICTS else ""
            if age_ms >= OLD_MS:
                notes.append(
                    f"group {row.group}{bad}: the oldest waiting message of {row.topic} has waited "
                    f"for {format_age(age_ms)}"
                )
            elif bad:
                notes.append(f"group {row.group}{bad} in topic {row.topic}")
        dead = self.dead_letters().items()
        return [f"group {group} has {count} dead letters" for group, count in dead] + notes

    def dead_letters(self) -> dict[str, int]:
        """Of each group that has some that were not sent back."""
        counts = {row.group: row.stored - row.redriven for row in self.lag.dead_letters}
        return {group: count for group, count in counts.items() if count > 0}

    def age_ms(self, row: admin.Lag) -> int:
        return max(0, self.lag.now_ms - row.oldest_ready_ms) if row.oldest_ready_ms else 0

    def lags(self) -> list[admin.Lag]:
        """The worst first: those with dead letters, then those whose oldest message has waited for
        longest, then the longest."""
        dead = self.dead_letters()
        return sorted(
            joined(self.lag),
            key=lambda row: (row.group not in dead, -self.age_ms(row), -total_of(row)),
        )

    def dead(self, group: str) -> int:
        return sum(
            entry.stored - entry.redriven for entry in self.lag.dead_letters if entry.group == group
        )

    @property
    def pending(self) -> int:
        return sum(entry.count for entry in self.timers.pending)


def _missing(error: CallRefused, unknown: dict[str, str], hidden: dict[str, str]) -> dict[str, str]:
    """Where a part goes that was refused.  Raises the refusal of a caller that is not known."""
    if error.number == Code.UNAUTHORIZED:
        raise error
    return hidden if error.number == Code.FORBIDDEN else unknown


def _leads(member: pb.Member) -> bool:
    return member.alive and member.role in (pb.OPENING, pb.MASTER, pb.HANDING_OVER)


def run_status(args: Args) -> int:
    """0 when nothing is wrong, else 1."""
    with client_of(args) as client:
        view = ClusterView.of(client)
    print_rows(args, [status_row(view)], status_lines(view))
    return 1 if view.troubles else 0


def status_row(view: ClusterView) -> Row:
    """A part that could not be read is None."""
    parts = {
        "brokers": ("broker_groups", "brokers"),
        "topics": ("topics",),
        "lag": ("lag", "in_flight", "dead_letters"),
        "timers": ("pending_timers", "next_due_ms"),
    }
    unknown = {name: None for part in view.unknown for name in parts[part]}
    return {
        "healthy": not view.troubles,
        "troubles": view.troubles,
        "notes": view.notes,
        "broker_groups": len(view.brokers.groups),
        "brokers": sum(len(state.members) for state in view.brokers.groups),
        "topics": len(view.topics),
        "lag": sum(map(total_of, view.lags())),
        "in_flight": sum(row.in_flight for row in view.lags()),
        "pending_timers": view.pending,
        "next_due_ms": view.timers.next_due_ms or None,
        "dead_letters": sum(entry.stored - entry.redriven for entry in view.lag.dead_letters),
        **unknown,
    }


def status_lines(view: ClusterView) -> list[str]:
    row = status_row(view)
    well = "healthy, but have a look:" if view.notes else "healthy"
    lines = [coloured(well, "green") if row["healthy"] else coloured("not healthy:", "red")]
    lines += [folded(f"  {trouble}") for trouble in view.troubles]
    lines += [coloured(folded(f"  {note}"), "yellow") for note in view.notes[:SHOWN_NOTES]]
    if len(view.notes) > SHOWN_NOTES:
        lines.append(f"  and {len(view.notes) - SHOWN_NOTES} more: `popmq lag` has all")

    def shown(name: str) -> object:
        return "?" if row[name] is None else row[name]

    due = view.timers.next_due_ms
    next_due = f", the next {format_due(due, view.lag.now_ms)}" if due else ""
    lines += [
        "",
        columns(
            ("TOPICS", "LAG", "IN-FLIGHT", "DEAD-LETTERS", "TIMERS"),
            [
                (
                    *map(shown, ("topics", "lag", "in_flight", "dead_letters")),
                    f"{shown('pending_timers')}{next_due}",
                )
            ],
        ),
        "",
        *(["brokers: ?"] if "brokers" in view.unknown else list_lines(view.brokers)),
    ]
    worst = view.lags()[:SHOWN_GROUPS]
    if worst:
        lines += ["", columns(GROUP_HEADER, group_cells(view, worst), optional=("RETRIES",))]
    if len(view.lags()) > SHOWN_GROUPS:
        lines.append(f"and {len(view.lags()) - SHOWN_GROUPS} more: `popmq lag` has all")
    return "\n".join(lines).splitlines()


def group_cells(view: ClusterView, rows: Sequence[admin.Lag]) -> list[tuple[object, ...]]:
    return [
        (
            row.group,
            row.topic,
            total_of(row),
            row.ready,
            row.in_flight,
            row.retries,
            format_age(view.age_ms(row)) if row.oldest_ready_ms else "-",
            view.dead(row.group),
        )
        for row in rows
    ]


def topic_cells(view: ClusterView) -> list[tuple[object, ...]]:
    """The topics with the most to do first."""
    pending = {entry.topic: entry.count for entry in view.timers.pending}
    rows: dict[str, list[admin.Lag]] = {topic.name: [] for topic in view.topics}
    for row in view.lags():
        rows.setdefault(row.topic, []).append(row)

    def todo(topic: admin.Topic) -> int:
        return sum(map(total_of, rows[topic.name]))

    return [
        (
            topic.name,
            topic.type,
            len(rows[topic.name]),
            todo(topic),
            sum(row.ready for row in rows[topic.name]),
            sum(row.in_flight for row in rows[topic.name]),
            pending.get(topic.name, 0),
        )
        for topic in sorted(view.topics, key=lambda topic: (-todo(topic), topic.name))
    ]


def run_top(args: Args) -> int:
    with client_of(args) as client:
        return watch(args.every / 1000, lambda: top_lines(ClusterView.of(client)))


def top_lines(view: ClusterView) -> list[str]:
    lines = [coloured(trouble, "red") for trouble in view.troubles]
    optional = ("RETRIES", "DEAD")
    groups = columns(GROUP_HEADER, group_cells(view, view.lags()), optional=optional)
    topics = columns(TOPIC_HEADER, topic_cells(view), optional=("TYPE", "TIMERS"))
    for table in ("\n".join(list_lines(view.brokers)), groups, topics):
        first, *rest = table.splitlines()
        lines += [*([""] if lines else []), heading(first), *rest]
    return lines


status = command(
    "status",
    run_status,
    help="Show on one page whether the cluster is healthy. Exit status 1 when something is wrong.",
    examples=("popmq status", "popmq status -o json"),
)
top = command(
    "top",
    run_top,
    option("--every", type=POSITIVE_DURATION, default="2s", metavar="2s", help="[default: 2s]"),
    help="Show brokers, groups and topics again and again, the worst first, until Ctrl-C.",
    examples=("popmq top --every 5s",),
    prints=False,
)
