"""The first Super user, from the file that auth.admin_file names (`popmq up --auth`).

The file is written before the user, so a start that is cut off ends in the same user at the next
one.  A cluster that has users already is left as it is.
"""

import json
import logging
import os
import secrets

from popmq.common.errors import ConfigError, PopmqError
from popmq.common.protocol.user_records import secret_record
from popmq.common.users import SECRET_BYTES, AuthMode, check_user_name
from popmq.common.wire.meta_pb2 import ChangeUserReply, ChangeUserRequest
from popmq.proxy.auth.sealing import check_private, write_private_file
from popmq.proxy.auth.user_follower import UserFollower
from popmq.proxy.auth.users import KnownUsers

logger = logging.getLogger(__name__)

NAME = "admin"
SECRET_ID = "first"


def make_admin_file(path: str) -> None:
    """Unless it is there already."""
    content = json.dumps({"access_key": NAME, "secret": secrets.token_hex(20)})
    write_private_file(path, f"{content}\n")


def read_admin_file(path: str) -> tuple[str, str]:
    """The access key and the secret. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            content = json.load(file)
        access_key, secret = str(content["access_key"]), str(content["secret"])
        check_user_name(access_key)
    except (OSError, ValueError, KeyError, TypeError, PopmqError) as error:
        raise ConfigError(f"auth.admin_file = {path}: cannot be read: {error!r}") from error
    check_private(status, f"auth.admin_file = {path}", path)
    if not SECRET_BYTES[0] <= len(secret) <= SECRET_BYTES[1]:
        low, high = SECRET_BYTES
        raise ConfigError(f"auth.admin_file = {path}: a secret has {low} to {high} characters")
    return access_key, secret


def create_first_admin(users: KnownUsers, follower: UserFollower, cluster: str, path: str) -> None:
    """Of two proxies that do this at once, the second is refused."""
    keys = users.keys
    assert keys is not None, "the settings say so"
    make_admin_file(path)
    access_key, secret = read_admin_file(path)
    sealed = keys.seal(secret.encode(), cluster=cluster, user=access_key, secret_id=SECRET_ID)
    change = ChangeUserRequest(
        kind=ChangeUserRequest.CREATE,
        name=access_key,
        type="super",
        secret=secret_record(sealed),
        mode=AuthMode.ON.value,
    )
    follower.change(change, _created)


def _created(answer: ChangeUserReply | PopmqError) -> None:
    if isinstance(answer, PopmqError):
        logger.warning("the first user was not made", extra={"why": str(answer)})
    else:
        logger.info("the first user was made", extra={"user": answer.user.name})
