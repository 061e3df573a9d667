"""Signer: signs the calls that popmq's own commands and processes make at a proxy.

The signature is that of official clients, HMAC-SHA1 of the date (docs/concepts/users.md).  The date
is RFC 3339 with its offset, so that a server need not learn the caller's time zone.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

ACCESS_KEY_VARIABLE = "POPMQ_ACCESS_KEY"
SECRET_VARIABLE = "POPMQ_SECRET"
# Of the JSON file of the first user, of what `popmq user create -o json` prints, and of Secrets.
ACCESS_KEY_FIELD, SECRET_FIELD = "access_key", "secret"
ALGORITHM = "MQv2-HMAC-SHA1"
DATE_HEADER, AUTHORIZATION_HEADER = "x-mq-date-time", "authorization"


@dataclass(frozen=True, slots=True)
class Signer:
    """Without an access key calls have a date and no signature."""

    access_key: str = ""
    secret: str = field(default="", repr=False)

    def headers(self) -> list[tuple[str, str]]:
        """Of a call that is made now; proxies accept them for a while (auth.skew_ms)."""
        date = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        headers = [(DATE_HEADER, date)]
        if self.access_key:
            import hmac  # commands that sign nothing start without it

            signature = hmac.digest(self.secret.encode(), date.encode(), "sha1").hex()
            parts = f"Credential={self.access_key}, SignedHeaders={DATE_HEADER}"
            value = f"{ALGORITHM} {parts}, Signature={signature}"
            headers.append((AUTHORIZATION_HEADER, value))
        return headers


def signer_of(environ: Mapping[str, str]) -> Signer:
    """The user that the environment names."""
    return Signer(environ.get(ACCESS_KEY_VARIABLE, ""), environ.get(SECRET_VARIABLE, ""))
