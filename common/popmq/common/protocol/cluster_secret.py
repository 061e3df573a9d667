"""The secret that the processes of a cluster share, and the proof that a process holds it.

After both HELLOs each side sends a PROOF: a MAC over its own side's name and both HELLOs.  Each
HELLO carries a fresh random challenge, so a recorded proof is worthless, and the proof covers the
role, name and cluster that the HELLO states (docs/concepts/frames.md#authentication).
"""

import hashlib
import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from typing import Literal

from popmq.common.errors import ConfigError

Side = Literal["asker", "server"]

CHALLENGE_BYTES = 16
MIN_SECRET_BYTES = 32
MAX_FILE_BYTES = 4_096
MAX_SECRETS = 4


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """`secrets` holds the current secret first, and those that are still accepted after it."""

    secrets: tuple[bytes, ...] = field(repr=False)

    def proof(self, side: Side, asker_hello: bytes, server_hello: bytes) -> bytes:
        """What `side` sends; both HELLOs as they were on the wire."""
        return _mac(self.secrets[0], side, asker_hello, server_hello)

    def proves(self, proof: bytes, side: Side, asker_hello: bytes, server_hello: bytes) -> bool:
        """Whether `side` holds one of our secrets. The time does not depend on the proof."""
        matches = [
            hmac.compare_digest(proof, _mac(secret, side, asker_hello, server_hello))
            for secret in self.secrets
        ]
        return any(matches)


def new_challenge() -> str:
    return secrets.token_hex(CHALLENGE_BYTES)


def _mac(secret: bytes, side: Side, asker_hello: bytes, server_hello: bytes) -> bytes:
    # The digests have one length each, so no two pairs of HELLOs give the same text.
    digests = hashlib.sha256(asker_hello).digest() + hashlib.sha256(server_hello).digest()
    return hmac.digest(secret, b"popmq frames " + side.encode() + digests, "sha256")


def load_cluster_secret(path: str) -> ClusterSecret:
    """The secrets of the file, one a line, each at least 32 bytes.

    Raises ConfigError when the file cannot be read, is readable by every user of the machine, or
    holds no such line.  (A group may read it: Kubernetes mounts a Secret for a group.)
    """

    origin = f"cluster.secret_file = {path}"
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{origin}: cannot be read: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o007:
        raise ConfigError(
            f"{origin}: every user may open it (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}"
        )
    return parse_cluster_secret(text, origin)


def parse_cluster_secret(text: bytes, origin: str) -> ClusterSecret:
    """The secrets of a file's content.  Raises ConfigError, which names `origin`."""

    def refused(complaint: str) -> ConfigError:
        return ConfigError(f"{origin}: {complaint}")

    if len(text) > MAX_FILE_BYTES:
        raise refused(f"longer than {MAX_FILE_BYTES} bytes")
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not 1 <= len(lines) <= MAX_SECRETS:
        raise refused(f"{len(lines)} secrets: 1 to {MAX_SECRETS}, one a line")
    for number, line in enumerate(lines, 1):
        if len(line) < MIN_SECRET_BYTES or not re.fullmatch(rb"[!-~]+", line):
            raise refused(
                f"line {number} has {len(line)} bytes: at least {MIN_SECRET_BYTES} printable ones, "
                "as `openssl rand -hex 32` prints"
            )
    return ClusterSecret(lines)


def new_secret_text() -> str:
    """What a new file of a cluster's secret holds."""
    return f"{secrets.token_hex(32)}\n"


def make_cluster_secret(path: str) -> None:
    """Write a new secret to `path`, for its owner only, unless the file is there already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(new_secret_text())
        file.flush()
        os.fsync(file.fileno())
