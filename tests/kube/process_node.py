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
from typing import Any

from kube.control_plane import ROOT, ControlPlane
from kube.fake_api import Object
from kube.kubelet import Kubelet, conditions, now
from kube.sandbox import skip_without_root

PREFIX = "/opt/popmq"  # of the image
GRACE_S = 10.0
PORTS = {
    "BROKER_LISTEN": 10911,
    "CONTROLLER_LISTEN": 9878,
    "PROXY_LISTEN": 8081,
    "PROXY_ADMIN_LISTEN": 8082,
    "HTTP_LISTEN": 5557,
}
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
    reported: bool = False
    message: Path | None = None  # that the container leaves when it ends


class ProcessNode(Kubelet):
    """A role listens at its pod's address where it would listen at all of a pod's own network.

    `accepts` chooses pods, others wait for ever; `names` are those that are no Service's, with
    their addresses; `network` is the first three numbers of all addresses."""

    def __init__(
        self,
        plane: ControlPlane,
        folder: Path,
        *,
        image: Image,
        network: str,
        names: Mapping[str, str],
        accepts: Callable[[Object], bool],
    ) -> None:
        skip_without_root()
        super().__init__(plane, "here")
        self.started: list[Object] = []  # as they were then
        self._folder = folder
        self._image = image
        self._network = network
        self._names = dict(names)
        self._wanted = accepts
        self._running: dict[str, Running] = {}  # by uid
        self._hosts = folder / "hosts"
        self._hosts.write_text("")

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        finally:
            for process in self._running.values():
                _signal(process, signal.SIGKILL)
                process.process.wait()

    def kill(self, pod: Object) -> None:
        """As when its memory is at an end."""
        _signal(self._running[pod["metadata"]["uid"]], signal.SIGKILL)

    def claim(self, name: str) -> Path:
        """The folder that is the volume of a claim."""
        return self._folder / "claims" / name

    def said(self, pod: str) -> str:
        """On standard output."""
        return (self._folder / f"{pod}.out").read_text(errors="replace")

    def log(self, pod: str) -> str:
        return (self._folder / f"{pod}.log").read_text(errors="replace")[-4_000:]

    def see(self, pods: list[Object]) -> None:
        ours = {pod["metadata"]["uid"]: pod for pod in pods if self._wanted(pod)}
        for uid, process in self._running.items():
            if uid not in ours:
                _signal(process, signal.SIGKILL)
        for uid, pod in ours.items():
            running = self._running.get(uid)
            if "deletionTimestamp" in pod["metadata"]:
                self._end(pod, running)
            elif running is None:
                if self._is_complete(pod):
                    self._start(pod)
            elif not running.reported and running.process.poll() is not None:
                running.reported = self._tell_of(pod, running)
        self._name_services(list(ours.values()))

    def _start(self, pod: Object) -> None:
        metadata = pod["metadata"]
        address = f"{self._network}.{10 + len(self._running)}"
        (container,) = pod["spec"]["containers"]
        variables = self._variables(pod, container, address)
        given = [*container.get("command", self._image.entry_point), *container.get("args", ())]
        command = [
            _REFERENCE.sub(lambda match: variables.get(match[1], match[0]), word) for word in given
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
        self._running[metadata["uid"]] = item = Running(pod, address, process)
        if "terminationMessagePath" in container and not container[
            "terminationMessagePath"
        ].startswith("/dev/"):
            item.message = self._folder / metadata["uid"] / "message"
        self.started.append(pod)
        self._tell_of(pod, item)

    def _end(self, pod: Object, process: Running | None) -> None:
        if process is not None and process.process.poll() is None:
            if not process.kill_at:
                process.kill_at = time.monotonic() + GRACE_S
                _signal(process, signal.SIGTERM)
            elif time.monotonic() > process.kill_at:
                _signal(process, signal.SIGKILL)
            return
        self.remove(pod)

    def _tell_of(self, pod: Object, process: Running) -> bool:
        """The pod's status: it runs, or how it ended."""
        code = process.process.poll()
        (container,) = pod["spec"]["containers"]
        runs = code is None
        phase = "Running" if runs else "Failed" if code else "Succeeded"
        state: Object = {"running": {"startedAt": now()}}
        if code is not None:
            end = {"exitCode": code if code >= 0 else 128 - code, "finishedAt": now()}
            if process.message is not None:
                end["message"] = process.message.read_text(errors="replace")[:4_096]
            state = {"terminated": end}
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
            "podIP": process.address,
            "podIPs": [{"ip": process.address}],
            "conditions": conditions(PodScheduled=True, Ready=runs, ContainersReady=runs),
            "containerStatuses": [of_container],
        }
        return self.tell(pod, status)

    # -- what a container finds

    def _variables(self, pod: Object, container: Object, address: str) -> dict[str, str]:
        variables = {
            **self._image.environment,
            "KUBERNETES_SERVICE_HOST": self.plane.host,
            "KUBERNETES_SERVICE_PORT": str(self.plane.api_port),
        }
        fields = {
            "metadata.name": pod["metadata"]["name"],
            "metadata.namespace": pod["metadata"]["namespace"],
            "status.podIP": address,
        }
        if "--config" in container.get("args", ()):
            variables |= {
                f"POPMQ_{setting}": f"{address}:{port}" for setting, port in PORTS.items()
            }
        for item in container.get("env", ()):
            source = item.get("valueFrom", {}).get("fieldRef")
            value = fields[source["fieldPath"]] if source else item.get("value", "")
            # As a kubelet does: variables that come before may be named.
            variables[item["name"]] = re.sub(
                r"\$\(([A-Z_]+)\)", lambda match: variables.get(match[1], match[0]), value
            )
        return variables

    def _root(self, pod: Object, container: Object) -> str:
        """A script that makes the container's files and becomes its command."""
        home = self._folder / pod["metadata"]["uid"]
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        binds = []
        for mount in container.get("volumeMounts", ()):
            claim = volumes[mount["name"]].get("persistentVolumeClaim", {}).get("claimName")
            place = self.claim(claim) if claim else home / mount["name"]
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
        path = container.get("terminationMessagePath", "/dev/")
        if not path.startswith("/dev/"):
            message = home / "message"
            message.touch()
            script += f"""
                mkdir -p root{shlex.quote(str(Path(path).parent))}
                touch root{shlex.quote(path)}
                mount --bind {shlex.quote(str(message))} root{shlex.quote(path)}
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
        for source in sources:
            if asked := source.get("serviceAccountToken"):
                account = pod["spec"]["serviceAccountName"]
                path = f"{where}/serviceaccounts/{account}/token"
                request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
                reply = self.plane.post(path, {**request, "spec": {}})
                (place / asked["path"]).write_text(reply["status"]["token"])
            elif "downwardAPI" in source:
                (place / "namespace").write_text(pod["metadata"]["namespace"])
            elif asked := source.get("configMap"):
                data = (self.plane.get(f"{where}/configmaps/{asked['name']}") or {})["data"]
                _write(place, {key: text.encode() for key, text in data.items()}, asked)
            elif asked := source.get("secret"):
                name = asked.get("secretName") or asked["name"]
                data = (self.plane.get(f"{where}/secrets/{name}") or {})["data"]
                if "projected" in volume:  # here roles run as root, for whom its group is another
                    asked = {**asked, "defaultMode": 0o600}
                _write(place, {key: base64.b64decode(text) for key, text in data.items()}, asked)
            else:
                assert {"emptyDir", "persistentVolumeClaim"} & set(source), source

    def _name_services(self, pods: list[Object]) -> None:
        """Of Services and of pods behind headless ones, as the cluster's DNS would; written in
        place, since it is bound.  A Service leads to one of its pods."""
        names: dict[str, str] = {}
        for service in self.plane.items("/api/v1/services"):
            metadata, selector = service["metadata"], service["spec"].get("selector")
            if not selector:
                continue
            for pod in pods:
                labels = pod["metadata"].get("labels") or {}
                process = self._running.get(pod["metadata"]["uid"])
                if process is not None and selector.items() <= labels.items():
                    domain = f"{metadata['name']}.{metadata['namespace']}.svc"
                    names[domain] = process.address
                    if pod["spec"].get("subdomain") == metadata["name"]:
                        names[f"{pod['spec']['hostname']}.{domain}"] = process.address
        names |= self._names
        text = "127.0.0.1 localhost\n"
        text += "".join(f"{address} {name}\n" for name, address in sorted(names.items()))
        if self._hosts.read_text() != text:
            with self._hosts.open("r+") as hosts:
                hosts.write(text)
                hosts.truncate()


def _write(place: Path, data: Mapping[str, bytes], asked: Object) -> None:
    items = asked.get("items") or [{"key": key, "path": key} for key in data]
    for item in items:
        path = place / item["path"]
        path.write_bytes(data[item["key"]])
        path.chmod(asked.get("defaultMode", 0o644))


def _signal(process: Running, number: signal.Signals) -> None:
    """Also to what it has started."""
    if process.process.poll() is None:
        os.killpg(process.process.pid, number)


def _where(name: str) -> str:
    result = shutil.which(name)
    assert result is not None, name
    return result
