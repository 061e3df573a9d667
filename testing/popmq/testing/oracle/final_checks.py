"""Verdict: what the oracle says of each message when a run is over."""

from collections.abc import Callable

from popmq.testing.oracle.client_history import GroupReader, MessageHistory, SentMessageHistory
from popmq.testing.oracle.delivery_oracle import Oracle

Excuse = Callable[[GroupReader, SentMessageHistory, MessageHistory | None], bool]


def dead_letter(oracle: Oracle, group: str, number: int, copies: int) -> None:
    """`copies` of a message were found among the dead letters of the group's name."""
    topic = oracle.messages[number].topic
    readers = [r for r in oracle.readers if r.group.name == group and r.topic is topic]
    if not readers:
        return  # the group was made without an answer
    lives = [reader.lives.setdefault(number, MessageHistory()) for reader in readers]
    chains = sum(1 + life.chain + life.again + life.loose * copies for life in lives)
    if copies > max(1, chains):
        oracle.report_violation(
            "I8 max-N", f"{copies} dead letters of message {number}, {group}", lives[-1]
        )
    for life in lives:
        life.dead += copies
    if len(readers) > 1:
        return  # the group was made again: which of them it died in, nobody can say
    life, reader = lives[0], readers[0]
    if life.loose or life.chain or life.again:
        return  # of which of its lives it is a letter, neither
    if life.rejected or life.said:
        return
    if life.attempt < reader.group.max_attempts and not reader.unseen(life):
        oracle.report_violation("I8 max-N", f"message {number} died at {life.attempt}", life)
    if life.acked == 2:
        oracle.report_violation("I5 ack-final", f"message {number}: acked and dead", life)


def finish(oracle: Oracle, readers: list[GroupReader], excused: Excuse) -> None:
    """After the drain: everything confirmed is acked or dead in every lasting group."""
    for reader in readers:
        for sent in oracle.messages:
            if not sent.ok_at or sent.topic is not reader.topic or not reader.accepts(sent):
                continue
            life = reader.lives.get(sent.number)
            missing = life is None or not (life.acked or life.dead or life.passed or life.said)
            if life is not None and life.rejected == 2 and not life.dead and not life.loose:
                missing = True
            if missing and not excused(reader, sent, life):
                known = life is not None and life.attempt > 0
                oracle.report_violation(
                    "I2 no-limbo" if known else "I1 no-loss",
                    f"message {sent.number} of {sent.topic.name}, confirmed at {sent.ok_at}, "
                    f"never came {'back ' if known else ''}to group {reader.group.name}",
                    life,
                )
