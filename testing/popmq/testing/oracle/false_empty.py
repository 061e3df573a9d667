"""I13, no false empty, and I15, isolation: what is ready for a receive, and is not given to it.

An answer of nothing says that nothing was ready; and who waits gets what is ready before the
broker rests, whatever others hold, block or leave behind at that time.
"""

from collections.abc import Callable

from popmq.testing.oracle.client_history import ReceiveCall, SentMessageHistory
from popmq.testing.oracle.delivery_oracle import Oracle


def popped_empty(oracle: Oracle, pop: ReceiveCall) -> None:
    """Complain of a message that nobody else can hold and that was confirmed before it was asked
    for.  For a FIFO group it is the first of its key that is not over."""
    if pop.dismissed or pop.reader.open_pops:
        return
    sent = _ready(oracle, pop, lambda sent: _was_there(sent, pop), before=pop.asked_at)
    if sent is not None:
        oracle.report_violation(
            "I13 no-false-empty",
            f"group {pop.reader.group.name}: empty at {oracle.at}, asked at {pop.asked_at}, "
            f"message {sent.number} of {sent.topic.name} was confirmed at {sent.ok_at}",
        )


def kept_waiting(oracle: Oracle, pop: ReceiveCall) -> None:
    """The broker rests: complain of a message that the receive could have, and still waits for."""
    if pop.dismissed or pop.reader.open_pops > 1:
        return
    sent = _ready(oracle, pop, lambda sent: bool(sent.ok_at), before=oracle.at)
    if sent is not None:
        oracle.report_violation(
            "I15 isolation",
            f"group {pop.reader.group.name}: waits at {oracle.at}, since {pop.asked_at}, though "
            f"message {sent.number} of {sent.topic.name} was confirmed at {sent.ok_at}",
        )


def _ready(
    oracle: Oracle, pop: ReceiveCall, there: Callable[[SentMessageHistory], bool], *, before: int
) -> SentMessageHistory | None:
    """A message that is certainly the receive's, and nobody else's; `before` this event, what
    stands in front of it in a FIFO group was over."""
    reader = pop.reader
    group = reader.group
    if group.from_newest or not reader.alive or oracle.log_lost or (group.fifo and oracle.parks):
        return None
    for sent in oracle.messages:
        if (
            sent.topic is reader.topic
            and sent.number not in reader.lives
            and there(sent)
            and reader.accepts(sent)
            and (not pop.tags or sent.tag in pop.tags)
            and pop.queue_id in (-1, sent.queue_id)
            and reader.lost_at < sent.asked_at
            and not sent.expired
            and (not group.fifo or oracle.order.is_first(reader, sent, before=before))
        ):
            return sent
    return None


def _was_there(sent: SentMessageHistory, pop: ReceiveCall) -> bool:
    waited = sent.ok_ms < pop.asked_ms + pop.poll_ms
    return bool(sent.ok_at) and (sent.ok_at < pop.asked_at or waited)
