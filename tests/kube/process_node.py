"""A node without containers: what a pod's container would run is a process of this machine.

It does a kubelet's work for the pods that a test wants run: accounts' tokens, volumes, variables,
names of Services, phases, and an end.  Each pod has an address of its own on loopback and sees this
machine's files through an overlay in a mount namespace, with its volumes where they belong; `image`
is what of a Dockerfile's stage a container needs to know, whose folder this environment stands for.
Left out: the user, limits and networks of containers (tests/pods has them).
"""

import base64
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kube.control_plane import ROOT, ControlPlane
from kube.fake_api import Object
from kube.kubelet import Kubelet, conditions, now
from kube.sandbox import skip_without_root

PREFIX = "/opt/popmq"  # of the image
GRACE_S = 10.0
_REFERENCE = re.compile(r"\$\(([A-Za-z0-9_]+)\)")


@dataclass(frozen=True, slots=True)
class Image:
    entry_point: list[str]
    environment: Mapping[str, str]


@dataclass(slots=True)
class Running:
    pod: Object
    address: str
    process: subprocess.Popen[bytes]
    kill_at: float = 0.0
    told: bool = False


class ProcessNode(Kubelet):
    """`wanted` chooses pods, others wait for ever; `names` are those that are no Service's, with
    their addresses; `network` is the first three numbers of all addresses."""

    def __init__(
        self,
        plane: ControlPlane,
        folder: Path,
        *,
        image: Image,
        network: str,
        names: Mapping[str, str],
        wanted: Callable[[Object], bool],
    ) -> None:
        skip_without_root()
        super().__init__(plane, "here")
        self.started: list[Object] = []  # as they were then
        self._folder = folder
        self._image = image
        self._network = network
        self._names = dict(names)
        self._wanted = wanted
        self._running: dict[str, Running] = {}  # by uid
        self._hosts = folder / "hosts"
        self._hosts.write_text("")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(kind, error, traceback)
        finally:
            for one in self._running.values():
                _signal(one, signal.SIGKILL)
                one.process.wait()

    def kill(self, pod: Object) -> None:
        """As when its memory is at an end."""
        _signal(self._running[pod["metadata"]["uid"]], signal.SIGKILL)

    def said(self, pod: str) -> str:
        """On standard output."""
        return (self._folder / f"{pod}.out").read_text(errors="replace")

    def log(self, pod: str) -> str:
        return (self._folder / f"{pod}.log").read_text(errors="replace")[-4_000:]

    def see(self, pods: list[Object]) -> None:
        ours = {one["metadata"]["uid"]: one for one in pods if self._wanted(one)}
        for uid, one in self._running.items():
            if uid not in ours:
                _signal(one, signal.SIGKILL)
        for uid, pod in ours.items():
            running = self._running.get(uid)
            if "deletionTimestamp" in pod["metadata"]:
                self._end(pod, running)
            elif running is None:
                if self._is_complete(pod):
                    self._start(pod)
            elif not running.told and running.process.poll() is not None:
                running.told = self._tell_of(pod, running)
        self._name_services(list(ours.values()))

    def _start(self, pod: Object) -> None:
        metadata = pod["metadata"]
        address = f"{self._network}.{10 + len(self._running)}"
        (container,) = pod["spec"]["containers"]
        variables = self._variables(pod, container, address)
        given = [*container.get("command", self._image.entry_point), *container.get("args", ())]
        command = [
            _REFERENCE.sub(lambda found: variables.get(found[1], found[0]), word) for word in given
        ]
        script = self._root(pod, container)
        lead = ["setpriv", "--pdeathsig", "KILL"]
        lead += ["unshare", "--uts", "--mount", "--propagation", "private"]
        name = metadata["name"]
        self._names[name] = address
        self._name_services([])
        with (
            (self._folder / f"{name}.out").open("wb") as out,
            (self._folder / f"{name}.log").open("wb") as log,
        ):
            process = subprocess.Popen(
                [*map(_where, lead[:1]), *lead[1:], "sh", "-c", script, "sh", *command],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
            )
        self._running[metadata["uid"]] = one = Running(pod, address, process)
        self.started.append(pod)
        self._tell_of(pod, one)

    def _end(self, pod: Object, one: Running | None) -> None:
        if one is not None and one.process.poll() is None:
            if not one.kill_at:
                one.kill_at = time.monotonic() + GRACE_S
                _signal(one, signal.SIGTERM)
            elif time.monotonic() > one.kill_at:
                _signal(one, signal.SIGKILL)
            return
        self.remove(pod)

    def _tell_of(self, pod: Object, one: Running) -> bool:
        """The pod's status: it runs, or how it ended."""
        code = one.process.poll()
        (container,) = pod["spec"]["containers"]
        runs = code is None
        phase = "Running" if runs else "Failed" if code else "Succeeded"
        state: Object = {"running": {"startedAt": now()}}
        if code is not None:
            state = {"terminated": {"exitCode": code if code >= 0 else 128 - code}}
        of_container = {
            "name": container["name"],
            "image": container["image"],
            "imageID": container["image"],
            "ready": runs,
            "restartCount": 0,
            "state": state,
        }
        status = {
            "phase": phase,
            "podIP": one.address,
            "podIPs": [{"ip": one.address}],
            "conditions": conditions(PodScheduled=True, Ready=runs, ContainersReady=runs),
            "containerStatuses": [of_container],
        }
        return self.tell(pod, status)

    # -- what a container finds

    def _variables(self, pod: Object, container: Object, address: str) -> dict[str, str]:
        found = {
            **self._image.environment,
            "KUBERNETES_SERVICE_HOST": self.plane.host,
            "KUBERNETES_SERVICE_PORT": str(self.plane.api_port),
        }
        fields = {
            "metadata.name": pod["metadata"]["name"],
            "metadata.namespace": pod["metadata"]["namespace"],
            "status.podIP": address,
        }
        for one in container.get("env", ()):
            source = one.get("valueFrom", {}).get("fieldRef")
            found[one["name"]] = fields[source["fieldPath"]] if source else one.get("value", "")
        return found

    def _root(self, pod: Object, container: Object) -> str:
        """A script that makes the container's files and becomes its command."""
        home = self._folder / pod["metadata"]["uid"]
        volumes = {one["name"]: one for one in pod["spec"].get("volumes", ())}
        binds = []
        for mount in container.get("volumeMounts", ()):
            place = home / mount["name"]
            if not place.exists():
                place.mkdir(parents=True)
                self._fill(place, volumes[mount["name"]], pod)
            binds.append((place, mount["mountPath"]))
        # Last, since a volume may be where they are.
        own = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
        binds += [(path, str(path)) for path in own]
        binds.append((Path(sys.prefix), PREFIX))
        work = home / "overlay"
        work.mkdir(parents=True)
        script = f"""
            set -e
            hostname {shlex.quote(pod["metadata"]["name"])}
            mount -t tmpfs -o mode=755 popmq {shlex.quote(str(work))}
            cd {shlex.quote(str(work))}
            mkdir upper work root
            mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
            mount --rbind /proc root/proc
            mount --rbind /dev root/dev
            mount --bind {shlex.quote(str(self._hosts))} root/etc/hosts
        """
        chroot = shlex.quote(_where("chroot"))
        for source, target in binds:  # a path may lead over links: /var/run does
            script += f"""
                at=root$({chroot} root realpath -m {shlex.quote(target)})
                mkdir -p "$at"
                mount --rbind {shlex.quote(str(source))} "$at"
            """
        return script + f"""exec {chroot} root /bin/sh -c 'cd /tmp && exec "$0" "$@"' "$@"\n"""

    def _is_complete(self, pod: Object) -> bool:
        """Spark makes what a driver's pod has in its volumes after the pod, whose name is in it."""
        where = f"/api/v1/namespaces/{pod['metadata']['namespace']}"
        for volume in pod["spec"].get("volumes", ()):
            for kind, key in (("configMap", "name"), ("secret", "secretName")):
                name = volume.get(kind, {}).get(key)
                if name and self.plane.get(f"{where}/{kind.lower()}s/{name}") is None:
                    return False
        return True

    def _fill(self, place: Path, volume: Object, pod: Object) -> None:
        sources = volume["projected"]["sources"] if "projected" in volume else [volume]
        where = f"/api/v1/namespaces/{pod['metadata']['namespace']}"
        for one in sources:
            if asked := one.get("serviceAccountToken"):
                account = pod["spec"]["serviceAccountName"]
                path = f"{where}/serviceaccounts/{account}/token"
                request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
                made = self.plane.post(path, {**request, "spec": {}})
                (place / asked["path"]).write_text(made["status"]["token"])
            elif "downwardAPI" in one:
                (place / "namespace").write_text(pod["metadata"]["namespace"])
            elif asked := one.get("configMap"):
                data = (self.plane.get(f"{where}/configmaps/{asked['name']}") or {})["data"]
                _write(place, {key: text.encode() for key, text in data.items()}, asked)
            elif asked := one.get("secret"):
                data = (self.plane.get(f"{where}/secrets/{asked['secretName']}") or {})["data"]
                _write(place, {key: base64.b64decode(text) for key, text in data.items()}, asked)
            else:
                assert "emptyDir" in one, one

    def _name_services(self, pods: list[Object]) -> None:
        """Of headless Services, as the cluster's DNS would; written in place, since it is bound."""
        names = dict(self._names)
        for service in self.plane.items("/api/v1/services"):
            metadata, selector = service["metadata"], service["spec"].get("selector")
            if service["spec"].get("clusterIP") != "None" or not selector:
                continue
            for pod in pods:
                labels = pod["metadata"].get("labels") or {}
                one = self._running.get(pod["metadata"]["uid"])
                if one is not None and selector.items() <= labels.items():
                    names[f"{metadata['name']}.{metadata['namespace']}.svc"] = one.address
        text = "127.0.0.1 localhost\n"
        text += "".join(f"{address} {name}\n" for name, address in sorted(names.items()))
        if self._hosts.read_text() != text:
            with self._hosts.open("r+") as hosts:
                hosts.write(text)
                hosts.truncate()


def _write(place: Path, data: Mapping[str, bytes], asked: Object) -> None:
    items = asked.get("items") or [{"key": key, "path": key} for key in data]
    for item in items:
        (place / item["path"]).write_bytes(data[item["key"]])


def _signal(one: Running, number: signal.Signals) -> None:
    """Also to what it has started."""
    if one.process.poll() is None:
        os.killpg(one.process.pid, number)


def _where(name: str) -> str:
    found = shutil.which(name)
    assert found is not None, name
    return found
