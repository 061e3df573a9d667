"""Where a proxy serves administration, as its public port tells callers on its machine.

The public port refuses these services with UNIMPLEMENTED and a sentence.  For a caller on the same
machine the sentence ends with the proxy's id and its admin endpoint in brackets:

    ... served on the admin port (proxy.admin_listen) [5f1e9a0c unix:/run/user/1000/popmq/x.sock]

The caller repeats the id in a header there.  So a public port that was forwarded from another
machine never leads to the popmq of the caller's own machine.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

ID_HEADER = "x-popmq-proxy"
OTHER_PROXY = "this is the admin port of another popmq"  # the answer to another id
ADMIN_LISTEN = "proxy.admin_listen"
_NAMED = re.compile(r" \[([0-9a-f]{16}) (.+)\]$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AdminEndpoint:
    """`address` is HOST:PORT, tls://HOST:PORT or unix:PATH."""

    proxy_id: str
    address: str


def refusal(service: str, endpoint: AdminEndpoint | None) -> str:
    """The sentence; `endpoint` for callers that may use it."""
    text = (
        f"{service} is not served on this public port (proxy.admin_on_public), but on the admin "
        f"port ({ADMIN_LISTEN}): name that with --admin-endpoint or POPMQ_ADMIN_ENDPOINT"
    )
    return f"{text} [{endpoint.proxy_id} {endpoint.address}]" if endpoint else text


def named_endpoint(details: str) -> AdminEndpoint | None:
    """What a refusal names; None if it names nothing."""
    match = _NAMED.search(details)
    return AdminEndpoint(match[1], match[2]) if match and ADMIN_LISTEN in details else None


class AdminRoute:
    """Which of several addresses is asked: the first that serves administration, or that names one.

    Admin ports come before public ones, which served it before this release.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self.used, self._left = AdminEndpoint("", ""), list[str]()
        self._begin()

    def go_on(self, *, implemented: bool, details: str) -> bool:
        """After a refusal for want of such a service, or no answer: whether `used` is another now
        that is to be asked at once."""
        if self.used.proxy_id and implemented:
            self._begin()  # started anew, perhaps; asked again, the public port names the new one
            return False
        named = None if implemented else named_endpoint(details)
        if named is None and not self._left:
            return False
        self.used = named or AdminEndpoint("", self._left.pop(0))
        return True

    @property
    def is_last(self) -> bool:
        return not self._left

    def _begin(self) -> None:
        self._left = list(self._addresses)
        self.used = AdminEndpoint("", self._left.pop(0))
