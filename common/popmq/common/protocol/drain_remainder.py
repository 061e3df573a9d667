"""What a broker group that is to go still has, from what the administration service tells."""

from collections.abc import Iterable
from dataclasses import dataclass

from popmq.common.errors import Code, Refused
from popmq.common.wire import admin_pb2 as admin


@dataclass(frozen=True, slots=True)
class DrainRemainder:
    """What a broker group that is drained still has; `homed` are topics that place there.

    Of its timers `leaving` are being handed to another group, which may have them already, and
    `moved` are with others; `waits` says why no more are handed over just now.  `transactions` are
    half messages that wait for their end; `unknown` says what could not be counted.
    """

    messages: int
    timers: int
    homed: tuple[str, ...]
    dead_letters: int
    leaving: int = 0
    moved: int = 0
    waits: str = ""
    transactions: int = 0
    unknown: str = ""

    @property
    def is_drained(self) -> bool:
        left = self.messages or self.timers or self.leaving or self.transactions
        return not (left or self.homed or self.unknown)


def drain_remainder(
    group: str,
    lag: admin.LagReply,
    topics: Iterable[admin.Topic],
    reply: admin.DrainReply,
) -> tuple[DrainRemainder, list[admin.Topic]]:
    """What is left, and the topics with a place (FIFO, lite) of which nothing is: they may go to
    other groups.

    `reply` has to be from before `lag`: what ends as a timer or a half message in between is a
    message then, and is counted at least once.  UNSUPPORTED when the broker's answer to DRAIN does
    not count its timers.
    """
    if not reply.counted:
        raise Refused(
            Code.UNSUPPORTED,
            f"the master of {group} does not say how many timers it has: it is of an older popmq",
        )
    left: dict[str, int] = {}
    for queue_lag in lag.lags:
        if queue_lag.broker == group:
            total = queue_lag.ready + queue_lag.in_flight + queue_lag.blocked
            left[queue_lag.topic] = left.get(queue_lag.topic, 0) + total
    for unread in reply.unread:
        left[unread.topic] = left.get(unread.topic, 0) + unread.messages
    here = [topic for topic in topics if group in topic.brokers]
    unknown = lag.incomplete
    if not unknown and group not in lag.brokers:  # this proxy may not know the group just now
        unknown = f"broker group {group} did not say what it has"
    rest = DrainRemainder(
        messages=sum(left.values()),
        timers=reply.timers,
        homed=tuple(topic.name for topic in here if left.get(topic.name)),
        dead_letters=sum(
            dead_letter.stored - dead_letter.redriven
            for dead_letter in lag.dead_letters
            if dead_letter.broker == group
        ),
        leaving=reply.leaving,
        moved=reply.moved,
        waits=reply.waits,
        transactions=reply.transactions,
        unknown=unknown,
    )
    free = [topic for topic in here if not left.get(topic.name)]
    return rest, [] if unknown else free


def remainder_text(group: str, rest: DrainRemainder) -> str:
    if rest.is_drained:
        dead = f"; it has {rest.dead_letters} dead letters" if rest.dead_letters else ""
        return f"{group} is drained: its brokers can be stopped and removed{dead}"
    if rest.unknown:
        return f"what {group} still has is not known: {rest.unknown}"
    leaving = f" and {rest.leaving} on their way to others" if rest.leaving else ""
    moved = f"; {rest.moved} timers were moved" if rest.moved else ""
    waits = f"; timers are not moved: {rest.waits}" if rest.waits else ""
    homed = f"; FIFO topics that wait for it: {', '.join(rest.homed)}" if rest.homed else ""
    halves = f", {rest.transactions} transactions without an end" if rest.transactions else ""
    has = f"{group} still has {rest.messages} messages, {rest.timers} timers{leaving}"
    return f"{has}{halves}{homed}{moved}{waits}"
