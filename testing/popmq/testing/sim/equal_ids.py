"""Equal ids: clients of a simulator that give different messages the same message id.

Containers that share a MAC address do so, and forked workers (record/send_fingerprint.py). Only a
client and a body that are equal too make a resend; each other message that was OK is delivered.
"""

import random

from popmq.common.record.send_fingerprint import fingerprint_field

# Seeds from here on have them: traces of earlier seeds stay as they are.
FIRST_SEED = 1_000_000
_SHARE = 0.25  # of the messages
_AMONG = 12  # of the newest ids


class EqualIds:
    def __init__(self, seed: int) -> None:
        self.on = seed >= FIRST_SEED
        self._rng = random.Random(f"equal ids {seed}")
        self._names: dict[str, list[str]] = {}  # by topic, the newest last

    def name(self, topic: str, own: str) -> str:
        """A message's id: its own one, or that of an earlier message of the topic."""
        if not self.on:
            return own
        names = self._names.setdefault(topic, [])
        name = own
        if names and self._rng.random() < _SHARE:
            name = self._rng.choice(names[-_AMONG:])
        names.append(name)
        return name

    def fingerprint(self, number: int) -> bytes:
        """The end of a message's properties, another one for each `number`."""
        return fingerprint_field(number + 1, bytes(16)) if self.on else b""
