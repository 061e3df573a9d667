"""What a broker group that is to go still has, from what the administration service tells."""

from collections.abc import Iterable
from dataclasses import dataclass

from popmq.common.wire import admin_pb2 as admin

TIMERS_LISTED = 1000


@dataclass(frozen=True, slots=True)
class Rest:
    """What a broker group that is drained still has; `homed` are FIFO topics that place there."""

    messages: int
    timers: int
    homed: tuple[str, ...]
    dead_letters: int

    @property
    def is_drained(self) -> bool:
        return not (self.messages or self.timers or self.homed)


def rest_of(
    group: str,
    lag: admin.LagReply,
    topics: Iterable[admin.Topic],
    timers: Iterable[admin.Timer],
) -> tuple[Rest, list[admin.Topic]]:
    """What is left, and the FIFO topics of which nothing is: they may go to other groups."""
    left: dict[str, int] = {}
    for one in lag.lags:
        if one.broker == group:
            total = one.ready + one.in_flight + one.delayed + one.blocked
            left[one.topic] = left.get(one.topic, 0) + total
    here = [topic for topic in topics if group in topic.brokers]
    rest = Rest(
        messages=sum(left.values()),
        timers=sum(1 for one in timers if one.broker == group),
        homed=tuple(topic.name for topic in here if left.get(topic.name)),
        dead_letters=sum(
            one.stored - one.redriven for one in lag.dead_letters if one.broker == group
        ),
    )
    return rest, [topic for topic in here if not left.get(topic.name)]


def rest_line(group: str, rest: Rest) -> str:
    if rest.is_drained:
        dead = f"; it has {rest.dead_letters} dead letters" if rest.dead_letters else ""
        return f"{group} is drained: its brokers can be stopped and removed{dead}"
    timers = f"{TIMERS_LISTED} or more" if rest.timers >= TIMERS_LISTED else str(rest.timers)
    homed = f"; FIFO topics that wait for it: {', '.join(rest.homed)}" if rest.homed else ""
    return f"{group} still has {rest.messages} messages and {timers} timers{homed}"
