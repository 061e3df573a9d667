"""FifoOrder (I7): what a FIFO group may be given, message group by message group.

A message is delivered only when all before it in its key are over (acked, dead-lettered,
rejected, skipped, passed over), or come in the same reply before it.  Knows nothing of the product:
the simulator puts one after the other, so the numbers of a key's messages are their order.
"""

from collections import defaultdict

from popmq.testing.oracle.client_history import (
    GroupReader,
    Held,
    MessageHistory,
    ReceiveCall,
    ResourceIncarnation,
    SentMessageHistory,
)
from popmq.testing.oracle.delivery_chains import may_be_over
from popmq.testing.oracle.handle_oracle import HandleOracle

_Key = tuple[ResourceIncarnation, int, bytes]


class FifoOrder:
    def __init__(self, oracle: HandleOracle) -> None:
        self._oracle = oracle
        self._lines: dict[_Key, list[SentMessageHistory]] = defaultdict(list)
        # By reader and number: what came after it, when it had to be over, and in which chain.
        self._behind: dict[tuple[int, int], tuple[int, int]] = {}

    def put(self, sent: SentMessageHistory) -> None:
        """Asked for, in this order; its queue is known."""
        self._lines[(sent.topic, sent.queue_id, sent.key)].append(sent)

    def reply(self, pop: ReceiveCall, got: list[Held], again: list[Held]) -> None:
        """One answered receive, in its order; `again` are deliveries that it repeats."""
        reader = pop.reader
        if not reader.group.fifo or self._oracle.log_lost:
            return
        together: set[int] = set()
        for held in got:
            if held not in again and not held.life.loose:
                self._check(reader, held, together)
            together.add(held.sent.number)

    def _check(self, reader: GroupReader, held: Held, together: set[int]) -> None:
        sent, life = held.sent, held.life
        later, chain = self._behind.get((id(reader), sent.number), (0, -1))
        # Where it had expired, a crash took that back.
        if chain == life.chain and not sent.expired:
            self._complain(f"{self._who(held)} comes after {later} of its key was delivered", held)
        for before in self._before(reader, sent):
            if before.number in together:
                continue
            other = reader.lives.get(before.number)
            exists = before.ok_at or (other is not None and other.attempt)
            over = before.expired or (other is not None and may_be_over(reader, other))
            unseen = other is None and reader.unseen(MessageHistory()) >= reader.group.max_attempts
            if exists and not over and not unseen:
                self._complain(
                    f"{self._who(held)} delivered, {before.number} of its key is not over", held
                )
                return
            chain = other.chain if other is not None else 0
            self._behind[(id(reader), before.number)] = (sent.number, chain)

    def is_first(self, reader: GroupReader, sent: SentMessageHistory, *, before: int) -> bool:
        """Whether all in front of it in its key were certainly over at event `before`."""
        lives = [reader.lives.get(history.number) for history in self._before(reader, sent)]
        return all(_is_over(life, before) for life in lives)

    def _before(self, reader: GroupReader, sent: SentMessageHistory) -> list[SentMessageHistory]:
        line = self._lines[(sent.topic, sent.queue_id, sent.key)]
        return [
            history
            for history in line
            if history.number < sent.number and reader.accepts(history) and not history.refused
        ]

    def _who(self, held: Held) -> str:
        return f"message {held.sent.number}, attempt {held.attempt}, {held.reader.group.name}"

    def _complain(self, what: str, held: Held) -> None:
        self._oracle.report_violation("I7 fifo", what, held.life)


def _is_over(life: MessageHistory | None, before: int) -> bool:
    """Certainly, and of a single copy: a letter that was sent back stands in the line again."""
    return bool(life and life.acked == 2 and not life.loose and life.acked_at < before)
