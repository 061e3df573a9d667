"""Sealing keys: users' secrets are sealed before they leave for a broker (docs/concepts/users.md).

AES-256-GCM; cluster, user and secret id are associated data, so a sealed secret that is copied to
another user or cluster does not open.  The file has a key a line, `ID HEX`; the first one seals,
all of them open.
"""

import logging
import os
import re
import secrets
import stat
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from popmq.common.errors import Code, ConfigError, PopmqError
from popmq.common.users import SealedSecret

logger = logging.getLogger(__name__)

KEY_BYTES = 32
NONCE_BYTES = 12
KEY_LIMIT = 16
MAX_FILE_BYTES = 4_096
_LINE = re.compile(r"([a-z0-9-]{1,32}) ([0-9a-f]{64})")


class CannotUnseal(PopmqError):
    """No key of this proxy opens the secret, or it was changed."""

    code = Code.INTERNAL_ERROR


@dataclass(frozen=True, slots=True)
class SealingKeys:
    keys: dict[str, AESGCM] = field(repr=False)  # by id; the first one seals

    @property
    def first(self) -> str:
        """The id of the key that seals."""
        return next(iter(self.keys))

    def seal(self, secret: bytes, *, cluster: str, user: str, secret_id: str) -> SealedSecret:
        key_id, key = next(iter(self.keys.items()))
        nonce = os.urandom(NONCE_BYTES)
        sealed = key.encrypt(nonce, secret, _associated(cluster, user, secret_id))
        return SealedSecret(secret_id, key_id, nonce, sealed)

    def reseal(self, secret: SealedSecret, *, cluster: str, user: str) -> SealedSecret:
        """The same secret under the first key. Raises CannotUnseal."""
        plain = self.unseal(secret, cluster=cluster, user=user)
        return self.seal(plain, cluster=cluster, user=user, secret_id=secret.id)

    def unseal(self, secret: SealedSecret, *, cluster: str, user: str) -> bytes:
        """Raises CannotUnseal."""
        key = self.keys.get(secret.key)
        if key is None:
            raise CannotUnseal(
                f"secret {secret.id} of user {user} is sealed with key {secret.key!r}, which this "
                "proxy does not have (auth.key_file)"
            )
        try:
            return key.decrypt(secret.nonce, secret.sealed, _associated(cluster, user, secret.id))
        except (InvalidTag, ValueError) as error:
            raise CannotUnseal(
                f"secret {secret.id} of user {user} does not open with key {secret.key!r}: it is "
                "of another user or cluster, or was changed"
            ) from error


def _associated(cluster: str, user: str, secret_id: str) -> bytes:
    # None of the three can have a zero byte, so no two triples give the same bytes.
    return f"popmq secret\0{cluster}\0{user}\0{secret_id}".encode()


def load_sealing_keys(path: str) -> SealingKeys:
    """Raises ConfigError for a file that others may read, or that holds no such keys."""
    origin = f"auth.key_file = {path}"
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{origin}: cannot be read: {error.strerror}") from error
    check_private(status, origin, path)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{origin}: longer than {MAX_FILE_BYTES} bytes")
    lines = [line.strip() for line in content.decode("ascii", "replace").splitlines()]
    keys: dict[str, AESGCM] = {}
    for number, line in enumerate(filter(None, lines), 1):
        matched = _LINE.fullmatch(line)
        if matched is None or matched[1] in keys:
            raise ConfigError(
                f"{origin}: line {number} is no key: an id of its own, a blank, and the 64 hex "
                "digits that `openssl rand -hex 32` prints"
            )
        keys[matched[1]] = AESGCM(bytes.fromhex(matched[2]))
    if not 1 <= len(keys) <= KEY_LIMIT:
        raise ConfigError(f"{origin}: {len(keys)} keys: 1 to {KEY_LIMIT}, one a line")
    return SealingKeys(keys)


class KeyFile:
    """The file of keys, loaded again when it changes: Kubernetes replaces files of Secrets."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError."""
        self._path = path
        self._seen = self._stamp()
        self.keys = load_sealing_keys(path)

    def changed(self) -> bool:
        """Whether there are other keys now; a file that cannot be used leaves those before."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self.keys = load_sealing_keys(self._path)
        except ConfigError as error:
            logger.error("the sealing keys from before stay", extra={"why": str(error)})
            return False
        logger.info("loaded sealing keys", extra={"keys": list(self.keys.keys)})
        return True

    def _stamp(self) -> tuple[int, ...]:
        try:
            status = os.stat(self._path)
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns


def check_private(status: os.stat_result, origin: str, path: str) -> None:
    """Raises ConfigError for a file that others may open.

    A Secret of Kubernetes is mounted as files of root, which the pod's group has to read.
    """
    mode = stat.S_IMODE(status.st_mode)
    is_mounted = status.st_uid == 0 and os.geteuid() != 0
    if mode & (0o037 if is_mounted else 0o077):
        raise ConfigError(f"{origin}: others may open it (mode {mode:04o}): chmod 600 {path}")


def make_key_file(path: str) -> None:
    """Write a new key to `path`, for its owner only, unless the file is there already."""
    write_private_file(path, f"k1 {secrets.token_hex(KEY_BYTES)}\n")


def write_private_file(path: str, content: str) -> bool:
    """Write `path` with mode 0600; False if it is there already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return True
