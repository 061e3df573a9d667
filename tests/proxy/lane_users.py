"""Users for tests/proxy/lane_world.py, who may do some things, and how they sign."""

import hmac
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from popmq.common.protocol.user_records import user_record
from popmq.common.settings.settings import Settings
from popmq.common.users import AuthMode, PolicyEntry, Quotas, UserConfig
from popmq.common.wire.meta_pb2 import FollowUsersReply
from popmq.proxy.auth.sealing import SealingKeys, load_sealing_keys, make_key_file

SECRET = b"secret of all of them, of forty characters"
DATE = "20231114T221320Z"  # as a ManualClock begins
_ALL = ("topic:*", "group:*")
_USERS = (
    UserConfig("ann", entries=(PolicyEntry(_ALL, ("pub", "sub")),)),
    UserConfig(
        "bob",
        entries=(
            PolicyEntry(_ALL, ("pub", "sub")),
            PolicyEntry(("topic:more", "group:ordered"), ("pub", "sub"), deny=True),
        ),
    ),
    UserConfig("dan", disabled=True, entries=(PolicyEntry(_ALL, ("pub", "sub")),)),
    UserConfig("eve", quotas=Quotas(calls=5), entries=(PolicyEntry(_ALL, ("pub", "sub")),)),
    UserConfig("root", is_super=True, entries=(PolicyEntry(("cluster",), ("pub", "sub")),)),
)
NAMES = (*(user.name for user in _USERS), "nobody")


@cache
def sealing_keys() -> SealingKeys:
    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "auth.key")
        make_key_file(path)
        return load_sealing_keys(path)


def users_reply(version: int, mode: AuthMode) -> FollowUsersReply:
    """What the owner of the users says of them."""
    records = []
    for user in _USERS:
        cluster = Settings().cluster.name
        sealed = sealing_keys().seal(SECRET, cluster=cluster, user=user.name, secret_id="s1")
        record = user_record(user)
        record.version = version
        record.secrets.add(id=sealed.id, key=sealed.key, nonce=sealed.nonce, sealed=sealed.sealed)
        records.append(record)
    return FollowUsersReply(epoch=1, version=version, mode=mode.value, whole=True, users=records)


@cache
def signed(name: str, secret: bytes = SECRET) -> Sequence[tuple[str, str]]:
    """The headers of a call of that user."""
    signature = hmac.digest(secret, DATE.encode(), "sha1").hex()
    header = (
        f"MQv2-HMAC-SHA1 Credential={name}, SignedHeaders=x-mq-date-time, Signature={signature}"
    )
    return ("authorization", header), ("x-mq-date-time", DATE)
