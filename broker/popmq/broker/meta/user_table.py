"""UserTable: users and the cluster's auth.mode, a function of the META records like topics.

`changes` counts every change, so that a proxy can ask for what is newer than what it has.  The
secrets in it are sealed; no broker has a key to them (docs/concepts/users.md).
"""

from collections import deque
from collections.abc import Iterator, Sequence

from popmq.broker.meta.meta_records import META_VERSION
from popmq.common.errors import Code, Refused
from popmq.common.protocol.user_records import user_of, user_record
from popmq.common.users import USER_LIMIT, AuthMode, UserConfig
from popmq.common.wire.meta_pb2 import AuthRecord, MetaRecord

DELETIONS_KEPT = 1_024


class UserTable:
    def __init__(self) -> None:
        self._users: dict[str, UserConfig] = {}
        self.mode = AuthMode.OFF
        self.changes = 0  # of users and the mode, ever
        # The newest deletions with their versions; what was before `_deletions_from` is forgotten.
        self._deletions: deque[tuple[int, str]] = deque()
        self._deletions_from = 0

    def __len__(self) -> int:
        return len(self._users)

    def __iter__(self) -> Iterator[UserConfig]:
        return iter(sorted(self._users.values(), key=lambda user: user.name))

    def find(self, name: str) -> UserConfig | None:
        return self._users.get(name)

    def user(self, name: str) -> UserConfig:
        user = self._users.get(name)
        if user is None:
            raise Refused(Code.NOT_FOUND, f"user {name[:100]} does not exist")
        return user

    def changed_since(self, version: int) -> Sequence[UserConfig]:
        return [user for user in self._users.values() if user.version > version]

    def deleted_since(self, version: int) -> Sequence[str] | None:
        """None: some may be forgotten, so that only the whole table says who is gone."""
        if version < self._deletions_from:
            return None
        return [name for at, name in self._deletions if at > version and name not in self._users]

    def check_room(self) -> None:
        if len(self._users) >= USER_LIMIT:
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"there are {USER_LIMIT} users, which is the limit; delete some",
            )

    # -- records

    def apply(self, record: MetaRecord) -> None:
        match record.WhichOneof("change"):
            case "user":
                user = user_of(record.user)
                self._users[user.name] = user
                self.changes = max(self.changes, user.version)
            case "user_deleted":
                self.changes += 1
                self._users.pop(record.user_deleted, None)
                self._deletions.append((self.changes, record.user_deleted))
                if len(self._deletions) > DELETIONS_KEPT:
                    self._deletions_from, _ = self._deletions.popleft()
            case "auth":
                self.mode = AuthMode(record.auth.mode)
                if record.auth.changes:  # of a snapshot
                    self.changes = self._deletions_from = record.auth.changes
                else:
                    self.changes += 1

    def snapshot_records(self) -> list[MetaRecord]:
        """None before the first change: tables without users have the hash that they always had."""
        if not self.changes:
            return []
        auth = AuthRecord(mode=self.mode.value, changes=self.changes)
        users = [MetaRecord(version=META_VERSION, user=user_record(user)) for user in self]
        return [MetaRecord(version=META_VERSION, auth=auth), *users]
