"""ReceiveAttemptIndex: live FIFO check points by the receive that they answer.

A receive that names its attempt and comes again is given the same messages again
(docs/concepts/pop.md); a check point whose receive had no attempt id is not in here.
"""

from popmq.broker.deliveries.ended_check_points import Key
from popmq.broker.deliveries.pop_check_point import PopCheckPoint

ReceiveAttemptKey = tuple[int, int, int, int]  # group, topic, client, attempt id


class ReceiveAttemptIndex:
    def __init__(self) -> None:
        self._receives: dict[ReceiveAttemptKey, dict[Key, PopCheckPoint]] = {}

    def of(self, receive: ReceiveAttemptKey) -> list[PopCheckPoint]:
        """What the receive was given and is not over, in order."""
        return list(self._receives.get(receive, {}).values())

    def add(self, ck: PopCheckPoint) -> None:
        if ck.attempt_id:
            self._receives.setdefault(ck.receive, {})[ck.key] = ck

    def remove(self, ck: PopCheckPoint) -> None:
        if ck.attempt_id:
            of_receive = self._receives[ck.receive]
            del of_receive[ck.key]
            if not of_receive:
                del self._receives[ck.receive]
