"""Helpers for testing code that uses popmq; shipped with it (docs/concepts/testing.md).

`broker` is where to begin.  The rest of the package is imported when it is first needed: the
pytest plugin lives here too, and every pytest run of a machine with popmq loads that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popmq.testing.running_broker import RunningBroker

__all__ = ["broker"]


def broker(
    *,
    data: str | Path | None = None,
    freeze: bool = False,
    settings: Mapping[str, object] | None = None,
    users: bool = False,
) -> RunningBroker:
    """A whole popmq in this process, on a free port, whose time the test moves.

    `with broker() as b:` starts and ends it.  `data` is a directory for its files; without one
    they are in memory.  With `freeze` time stands still but for `b.advance`.  `settings` are
    those of docs/reference/settings.md, such as {"group.max_attempts": 3}.  With `users` callers
    must sign: `b.access_key` and `b.secret` are those of a Super user.
    """
    from popmq.testing.running_broker import RunningBroker

    return RunningBroker(data=data, freeze=freeze, settings=settings, users=users)
