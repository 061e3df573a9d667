"""I13, no false empty: a receive is answered with nothing only if nothing was ready for it."""

from popmq.testing.history import Pop, Sent
from popmq.testing.oracle import Oracle


def popped_empty(oracle: Oracle, pop: Pop) -> None:
    """Complain of a message that nobody else can hold and that was confirmed before it was asked
    for.  For a FIFO group it is the first of its key that is not over."""
    reader = pop.reader
    group = reader.group
    unsure = pop.dismissed or reader.open_pops or oracle.log_lost
    if group.from_newest or not reader.alive or unsure or (group.fifo and oracle.parks):
        return
    for sent in oracle.messages:
        if (
            sent.topic is reader.topic
            and sent.number not in reader.lives
            and _was_there(sent, pop)
            and reader.accepts(sent)
            and (not pop.tags or sent.tag in pop.tags)
            and pop.queue_id in (-1, sent.queue_id)
            and reader.lost_at < sent.asked_at
            and not sent.expired
            and (not group.fifo or oracle.order.is_first(reader, sent, before=pop.asked_at))
        ):
            oracle.complain(
                "I13 no-false-empty",
                f"group {group.name}: empty at {oracle.at}, asked at {pop.asked_at}, "
                f"message {sent.number} of {sent.topic.name} was confirmed at {sent.ok_at}",
            )
            return


def _was_there(sent: Sent, pop: Pop) -> bool:
    waited = sent.ok_ms < pop.asked_ms + pop.poll_ms
    return bool(sent.ok_at) and (sent.ok_at < pop.asked_at or waited)
