"""Sends of a topic in memory: which of those that were OK may be gone.

A broker that died, however it did, may have taken with it what no disk had.  Who was only cut
off, paused or deposed takes nothing: all that could be elected had received it.
"""

from popmq.testing.cluster_world.history import Message

_LONGEST = 8 << 10  # a record


class MemorySends:
    def __init__(self) -> None:
        self._waiting: list[Message] = []  # OK, and not confirmed
        self._looked_to = 0

    def on_reply(self, message: Message, confirmed: bytearray) -> None:
        """The send was OK; `confirmed` is the log that was ever confirmed."""
        if message.head not in confirmed:
            self._waiting.append(message)

    def died(self) -> int:
        """A broker did; how many sends that were OK may be gone."""
        for message in self._waiting:
            message.excused = True
        return len(self._waiting)

    def look(self, confirmed: bytearray) -> None:
        """More is confirmed: that is never lost."""
        if not self._waiting:
            self._looked_to = len(confirmed)
            return
        new = confirmed[max(0, self._looked_to - _LONGEST) :]
        self._looked_to = len(confirmed)
        for message in self._waiting:
            if message.head in new:
                message.excused = False
                message.settled = True
        self._waiting = [one for one in self._waiting if not one.settled]
