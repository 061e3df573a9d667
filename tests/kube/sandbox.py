"""A Dockerfile taken step by step without a container runtime: root, an overlay and a chroot.

The base image is this machine, seen through an overlay whose upper half is a tmpfs in a mount
namespace of its own: nothing of it stays, also when the tests are killed.  Its Python is put where
the official image has it.  Or it is an image that a container runtime has made and mounted.  What
runs has its own user, no capabilities, and a read-only root.
"""

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest
from programs import run_program

_LIBC = ctypes.CDLL(None)
NEEDED = ("unshare", "nsenter", "mount", "chroot", "setpriv")


@dataclass
class Stage:
    """One FROM of a Dockerfile: what it does, in order."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def read_dockerfile(path: Path) -> list[Stage]:
    """Instructions before the first FROM are left out."""
    stages: list[Stage] = []
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in (stripped.strip() for stripped in text.splitlines()):
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(name, base))
        elif stages:
            stages[-1].steps.append((word, rest.strip()))
    return stages


def stage_line(stages: Sequence[Stage], name: str) -> list[Stage]:
    """The stage and those it is made from, first things first."""
    known = {stage.name: stage for stage in stages}
    found_stages: list[Stage] = []
    while name in known:
        found_stages.insert(0, known[name])
        name = known[name].base
    return found_stages


class Sandbox:
    """Enter it to make it; `run` and `start` are within.  Of a `source` the Dockerfile's steps can
    be taken; `image` is the root of one that is whole."""

    def __init__(self, folder: Path, source: Path | None = None, image: Path | None = None) -> None:
        skip_without_root()
        self.folder = folder
        self._work = folder / "sandbox"
        self._source = source
        self._image = image
        self._holder: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._work.mkdir()
        work = shlex.quote(str(self._work))
        lower = shlex.quote(str(self._image or "/"))
        script = f"""
            set -e
            mount -t tmpfs -o mode=755 popmq {work}
            cd {work}
            mkdir upper work root
            mount -t overlay overlay -o lowerdir={lower},upperdir=upper,workdir=work root
            mount --rbind /proc root/proc
            mount --rbind /dev root/dev
            mount -t tmpfs -o mode=1777 tmp root/tmp
            {self._base()}
            echo made
            exec sleep infinity
        """
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            stdout=subprocess.PIPE,
            preexec_fn=_die_with_parent,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"made\n":
            self._end()
            pytest.skip("this machine lets nobody make a mount namespace with an overlay")
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _base(self) -> str:
        """What the base image has that this machine has elsewhere; of an image that is whole, the
        names that every container runtime puts into it."""
        if self._source is None:
            return "cat /etc/hosts >root/etc/hosts"
        python = shlex.quote(sys.base_prefix)
        return f"""
            mkdir -p root/src root/opt
            mount --bind {shlex.quote(str(self._source))} root/src
            [ {python} = /usr ] || mount --bind {python} root/usr/local
            chroot root ldconfig  # its libraries too, as that image does
        """

    def _end(self) -> None:
        assert self._holder is not None
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()

    def run(self, command: str, environment: Mapping[str, str]) -> None:
        """As the builder does: root, and everything can be written."""
        done = run_program(
            [*self._inside(), "/bin/sh", "-c", command],
            env={**os.environ, **environment, "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin"},
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    def seal(self, *volumes: str) -> None:
        """From now on only /tmp and the volumes can be written."""
        root = shlex.quote(str(self._work / "root"))
        script = "set -e\n"
        for volume in volumes:
            at = f"{root}{shlex.quote(volume)}"
            script += f"mount -t tmpfs -o mode=700,uid=10001,gid=10001 volume {at}\n"
        script += f"mount -o remount,ro {root}\n"
        subprocess.run([*self._enter(), "sh", "-c", script], check=True)

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        user: str,
        log: Path,
    ) -> "subprocess.Popen[str]":
        """As a kubelet does for a pod of the profile `restricted`."""
        number, _, group = user.partition(":")
        limits = ("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
        client = (
            _where("setpriv"),
            f"--reuid={number}",
            f"--regid={group}",
            "--clear-groups",
            *limits,
        )
        with log.open("ab") as written:
            return subprocess.Popen(
                [*self._inside(), *client, "--", *arguments],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
                preexec_fn=_die_with_parent,
            )

    def written(self, name: str, text: str) -> str:
        """The path, inside, of a file that everybody may read."""
        path = f"/tmp/{name}"
        script = f"umask 022; cat >{shlex.quote(path)}"
        subprocess.run([*self._inside(), "sh", "-c", script], input=text, text=True, check=True)
        return path

    def size_bytes(self, path: str) -> int:
        process = run_program([*self._inside(), "du", "-sb", path], check=True)
        return int(process.stdout.split()[0])

    def compressed_bytes(self, path: str) -> int:
        """What a layer with this folder takes in a registry."""
        script = f"tar -cz {shlex.quote(path)} 2>/dev/null | wc -c"
        process = run_program([*self._inside(), "/bin/sh", "-c", script], check=True)
        return int(process.stdout)

    def _enter(self) -> list[str]:
        assert self._holder is not None
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt"]

    def _inside(self) -> list[str]:
        return [*self._enter(), _where("chroot"), str(self._work / "root")]


def _where(name: str) -> str:
    """What runs has a PATH of its own, which need not have the tools of root."""
    result = shutil.which(name)
    assert result is not None, name
    return result


def skip_without_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount: the steps of the Dockerfile are not run")
    missing = [name for name in NEEDED if not shutil.which(name)]
    if missing:
        pytest.skip(f"no {', '.join(missing)} (util-linux): the Dockerfile's steps are not run")


def _die_with_parent() -> None:
    """PR_SET_PDEATHSIG is 1 (man 2 prctl)."""
    _LIBC.prctl(1, signal.SIGKILL)
