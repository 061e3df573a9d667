"""Chains: what operators and rejects do to the life of a message, as far as clients can know.

A reset and a redrive begin a message's deliveries anew: attempts count from 1 and older handles
are over.  Knows nothing of the product; the oracle judges by what is kept here.
"""

from collections.abc import Sequence

from popmq.testing.oracle.client_history import (
    GroupReader,
    Held,
    MessageHistory,
    ReceiveCall,
    SentMessageHistory,
)


def may_be_dead(reader: GroupReader, life: MessageHistory) -> bool:
    """Whether a dead letter of it is possible, lost replies counted."""
    unseen = reader.unseen(life)
    last = life.attempt + unseen >= reader.group.max_attempts
    return last or bool(life.rejected or life.dead or life.resolved_at or life.ending)


def may_be_over(reader: GroupReader, life: MessageHistory) -> bool:
    """Whether the group may be through with it."""
    unsure = life.loose or life.passed or life.ending
    return bool(life.acked or unsure or may_be_dead(reader, life))


def look(pop: ReceiveCall, life: MessageHistory, attempt: int, *, forgotten: bool) -> None:
    """A delivery came: it begins a chain that a redrive made, or goes on with the old one."""
    reader = pop.reader
    # From before a reset, or after it?  It was asked for before; or it does not wait for the
    # reset's record, as a buffered group's.
    asked_before = pop.asked_at <= reader.reset_at and not reader.resets_open
    life.loose |= asked_before or (reader.resets_open > 0 and reader.group.buffered)
    unseen = reader.unseen(life)
    earlier = attempt <= life.attempt - forgotten or life.rejected
    could_die = life.acked != 2 or life.inherits
    if life.again and earlier and attempt <= 1 + unseen and could_die:
        life.again -= 1
        life.begin_again(life.lost_pops)


def over_because(held: Held) -> str:
    """Why the handle certainly stands for nothing any more; "" when it may."""
    life = held.life
    if held.superseded == 2:
        return "superseded"
    if held.acked or life.loose:
        return ""
    if life.chain > held.chain:
        return "" if held.rejected else "reset"
    if life.rejected == 2:
        return "rejected"
    return "revived" if life.attempt > held.attempt or life.dead else ""


def redrive_asked(readers: Sequence[GroupReader], messages: Sequence[SentMessageHistory]) -> None:
    """Every letter of the readers' group may come back once more; of `readers`, some may be an
    earlier group's of that name: its letters are sent to the one that has the name now."""
    for reader in readers:
        others = [other for other in readers if other.group is not reader.group]
        before = [other for other in others if other.topic is reader.topic]
        for sent in messages:
            if sent.topic is not reader.topic:
                continue
            inherited = sum(_may_have_died(reader, sent) for reader in before)
            if not inherited and not _may_have_come(reader, sent):
                continue
            life = reader.lives.setdefault(sent.number, MessageHistory())
            if inherited:
                # Two copies are on their way, unless its own is certainly over.
                life.loose |= life.acked != 2 or life.letters
                life.inherits = True
                life.again += inherited
            elif life.letters:
                life.loose = True  # a letter of an earlier chain, beside what is on its way
            elif may_be_dead(reader, life):
                life.again += 1


def copied_behind(
    readers: Sequence[GroupReader],
    everybody: Sequence[GroupReader],
    messages: Sequence[SentMessageHistory],
) -> None:
    """The letters of a FIFO group (`readers`) go to the end of their queue, and so to everybody:
    two copies are on their way from now on."""
    for mine in readers:
        for sent in messages:
            if sent.topic is not mine.topic:
                continue
            life = mine.lives.get(sent.number)
            if not _may_have_died(mine, sent) and (life is None or not life.letters):
                continue
            sent.copied = True
            for reader in everybody:
                if reader.topic is sent.topic and sent.number in reader.lives:
                    reader.lives[sent.number].loose = True


def _may_have_come(reader: GroupReader, sent: SentMessageHistory) -> bool:
    return sent.number in reader.lives or reader.unseen(MessageHistory()) > 0


def _may_have_died(reader: GroupReader, sent: SentMessageHistory) -> bool:
    life = reader.lives.get(sent.number, MessageHistory())
    return _may_have_come(reader, sent) and may_be_dead(reader, life)


def reset_done(
    reader: GroupReader,
    messages: Sequence[SentMessageHistory],
    offsets: dict[int, int],
    *,
    lost_before: int,
    whole: bool,
    retries_left: bool,
    parked_left: bool,
) -> None:
    """The group reads on at these offsets, by queue (all of the topic's if `whole`); nothing that
    was on its way from them comes back, but for `parked_left` from before them.

    `lost_before` pops were lost when it was asked for: later ones may have delivered behind it.
    """
    for sent in messages:
        unknown = sent.queue_id < 0 and not whole
        if sent.topic is not reader.topic or (sent.queue_id not in (-1, *offsets)):
            continue
        life = reader.lives.setdefault(sent.number, MessageHistory())
        popped = life.attempt > 0 or reader.unseen(life) > 0 or life.chain > 0
        popped = popped or reader.left_pops > 0  # what is undone is a retry, too
        perhaps_acked = life.loose and life.acked > 0  # perhaps since
        # Of a parked key that an operator gave up, also those that were never delivered.
        life.letters |= (popped or life.resolved_at > 0) and may_be_dead(reader, life)
        life.loose |= unknown or (retries_left and popped)
        life.begin_again(lost_before)
        life.acked = int(perhaps_acked)
        life.passed = sent.offset < offsets.get(sent.queue_id, 1 << 60)
        life.loose |= life.passed and parked_left
        life.skipped = life.passed and sent.offset >= 0 and not life.again
        if not life.passed and life.resolved_at < reader.reset_at:
            life.resolved_at = 0  # it is read again


def reset_lost(reader: GroupReader, messages: Sequence[SentMessageHistory]) -> None:
    """It was asked for, and nobody knows whether it happened."""
    for sent in messages:
        if sent.topic is reader.topic:
            life = reader.lives.setdefault(sent.number, MessageHistory())
            life.loose = life.passed = True
            life.acked = min(life.acked, 1)
