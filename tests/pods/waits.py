"""How long a sender waited for its next OK while the master of its broker group changed.

Pure: from the times of the OKs and from what the brokers logged.  A master that hands over admits
nothing more before another one leads, so the wait of a hand-over is the one that the new master's
beginning falls into, whatever other waits (proxies that are replaced, say) there are.
"""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise

TURNS = ("leading", "master", "the hand-over failed, serving again")  # a broker's events
NEAR_S = 0.25  # an answer of the old master may be on its way still


def waits_at_hand_overs(oks: Sequence[float], lines: Iterable[str]) -> dict[str, float]:
    """Seconds, by what the brokers' lines tell of: the longest wait between two OKs that touches
    it; infinite where no OK comes before it or after it.  `oks` are Unix times, in order."""
    waits: dict[str, float] = {}
    for what, moment in _turns(lines):
        waits[what] = max(waits.get(what, 0.0), _wait_near(oks, moment))
    return waits


def _wait_near(oks: Sequence[float], moment: float) -> float:
    if not oks or not oks[0] <= moment <= oks[-1]:
        return float("inf")
    return max(b - a for a, b in pairwise(oks) if a <= moment + NEAR_S and b >= moment - NEAR_S)


def _turns(lines: Iterable[str]) -> Iterable[tuple[str, float]]:
    for line in lines:
        try:
            document = json.loads(line)
        except ValueError:
            continue  # no line of popmq
        if isinstance(document, dict) and document.get("event") in TURNS:
            what = f"epoch {document['epoch']}" if "epoch" in document else str(document["event"])
            yield what, datetime.fromisoformat(document["time"]).timestamp()
