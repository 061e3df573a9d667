"""KnownUsers: the copy of the owner's users that this proxy decides by.

A user that changes is replaced by another object, and the old one is marked, so whatever is kept
by a user (a verified header, a decision) ends with the change.
"""

import ipaddress
import logging
from collections.abc import Iterable, Iterator, Sequence

from popmq.common.protocol.user_records import user_of
from popmq.common.users import AuthMode, UserConfig
from popmq.common.wire.meta_pb2 import FollowUsersReply, UserRecord
from popmq.proxy.auth.clock_offsets import Fresh
from popmq.proxy.auth.policy import Policy, is_within
from popmq.proxy.auth.sealing import CannotUnseal, SealingKeys

logger = logging.getLogger(__name__)


class KnownUser:
    """`secrets` are (secret, until_ms); 0 is no end. `is_current` until the user changes."""

    __slots__ = (
        "_keys",
        "_networks",
        "_secrets",
        "cluster",
        "config",
        "has_quotas",
        "is_current",
        "learns_clock",
        "offsets",
        "policy",
        "shown_clock",
    )

    def __init__(self, config: UserConfig, cluster: str, keys: SealingKeys | None) -> None:
        self.config = config
        self.cluster = cluster
        self.policy = Policy(config)
        self.is_current = True
        self.has_quotas = bool(config.quotas.limits())
        # Of the record, until this proxy learns one: the record follows.
        self.offsets: Sequence[int] = config.clock_offsets
        self.learns_clock = config.learns_clock
        self.shown_clock: Fresh | None = None  # what its newest header says of its clock
        self._keys = keys
        self._networks = tuple(map(ipaddress.ip_network, config.networks))
        self._secrets: list[tuple[bytes, int]] | None = None

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def creates_implicitly(self) -> bool:
        """Whether its sends may make topics: such topics are counted for no user."""
        return not (self.config.quotas.topics or self.config.quotas.queues)

    @property
    def secrets(self) -> list[tuple[bytes, int]]:
        """Opened at the first use: with 10,000 users few of them call here."""
        if self._secrets is None:
            self._secrets = list(self._unsealed())
        return self._secrets

    def may_call_from(self, host: str) -> bool:
        return is_within(host, self._networks)

    def _unsealed(self) -> Iterable[tuple[bytes, int]]:
        for secret in self.config.secrets:
            try:
                if self._keys is None:
                    raise CannotUnseal(f"user {self.name}: this proxy has no auth.key_file")
                opened = self._keys.unseal(secret, cluster=self.cluster, user=self.name)
                yield opened, secret.until_ms
            except CannotUnseal as error:
                logger.error("a user's secret does not open", extra={"why": str(error)})


class KnownUsers:
    """A user is its record until it calls: with 10,000 users few of them call at one proxy."""

    def __init__(self, cluster: str, keys: SealingKeys | None) -> None:
        self._cluster = cluster
        self.keys = keys
        self._records: dict[str, bytes] = {}
        self._users: dict[str, KnownUser] = {}  # of those that called since their last change
        self.mode: AuthMode | None = None  # None: the owner has not answered yet
        self.state = (0, 0)  # epoch and version of the owner's table

    def replace_keys(self, keys: SealingKeys) -> None:
        """Secrets are opened again, at the next use of each."""
        self.keys = keys
        for name in tuple(self._users):
            self._forget(name)

    def find(self, name: str) -> KnownUser | None:
        user = self._users.get(name)
        if user is None and (record := self._records.get(name)) is not None:
            config = user_of(UserRecord.FromString(record))
            user = self._users[name] = KnownUser(config, self._cluster, self.keys)
        return user

    def __len__(self) -> int:
        return len(self._records)

    def configs(self) -> Iterator[UserConfig]:
        """Of all users, by their names."""
        for name in sorted(self._records):
            yield user_of(UserRecord.FromString(self._records[name]))

    def apply(self, reply: FollowUsersReply) -> bool:
        """Whether anything changed."""
        state = reply.epoch, reply.version
        changed = state != self.state or self.mode is None
        if reply.whole:
            kept = {record.name for record in reply.users}
            gone = [name for name in self._records if name not in kept]
        else:
            gone = list(reply.deleted)
        for name in gone:
            self._records.pop(name, None)
            self._forget(name)
        for record in reply.users:
            content = record.SerializeToString(deterministic=True)
            if self._records.get(record.name) != content:
                self._records[record.name] = content
                self._forget(record.name)
        self.mode, self.state = AuthMode(reply.mode), state
        return changed

    def _forget(self, name: str) -> None:
        if (user := self._users.pop(name, None)) is not None:
            user.is_current = False
