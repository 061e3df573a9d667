"""Unix sockets that only the user of the process may connect to, and a folder for them.

A socket file that nobody listens on, as kill -9 leaves it, is replaced.
"""

import errno
import os
import socket
import stat
import struct
import tempfile

# A unix socket's path has 108 bytes with its final zero (man 7 unix).
SOCKET_PATH_LIMIT = 107

#   0     4     8     12
#   | pid | uid | gid |        what SO_PEERCRED gives (man 7 unix)
_CREDENTIALS = struct.Struct("3i")


class BoundSocket:
    """A socket at a path, not listening yet; `remove` deletes the file unless another replaced it.

    Raises OSError, EADDRINUSE if another process listens there.
    """

    def __init__(self, path: str) -> None:
        if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
            text = f"a path of {len(os.fsencode(path))} bytes; the limit is {SOCKET_PATH_LIMIT}"
            raise OSError(errno.ENAMETOOLONG, text, path)
        _remove_stale(path)
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.bind(path)
            # Before `listen`, so nobody can connect earlier.
            os.chmod(path, 0o600)
            self._inode = os.stat(path).st_ino
        except OSError:
            self.sock.close()
            raise

    def remove(self) -> None:
        try:
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        except FileNotFoundError:
            pass


def _remove_stale(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "not a socket, so it is not replaced", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # its queue of new connections is full: somebody listens
    raise OSError(errno.EADDRINUSE, "another process listens on this socket", path)


def bind_own(runtime_folder: str, name: str) -> BoundSocket:
    """In a folder of this user: `popmq` in `runtime_folder` (XDG_RUNTIME_DIR), or one below /tmp.

    If another process listens at `name`, as in another network namespace, the pid makes it another.
    Raises OSError when no folder can be made.
    """
    temporary = f"{tempfile.gettempdir()}/popmq-{os.geteuid()}"
    folders = [f"{runtime_folder}/popmq", temporary] if runtime_folder else [temporary]
    for folder in folders:
        for path in (f"{folder}/{name}.sock", f"{folder}/{name}-{os.getpid()}.sock"):
            try:
                _make_private(folder)
                return BoundSocket(path)
            except OSError as error:
                failure = error
    raise failure


USER_PREFIX = "uid-"


def _make_private(folder: str) -> None:
    """Raises OSError unless it is a folder of this user alone: below /tmp anybody may make one."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    made = os.lstat(folder)
    if not stat.S_ISDIR(made.st_mode) or made.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "a folder of another user", folder)
    if made.st_mode & 0o077:
        os.chmod(folder, 0o700)


def user_of_peer(sock: socket.socket) -> str:
    """`uid-N:PID` of the process at the other end."""
    size = _CREDENTIALS.size
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return f"{USER_PREFIX}{uid}:{pid}"
