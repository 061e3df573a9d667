"""Real nodes: a containerd and a kubelet each, on one bridge, with cluster DNS and Services.

Runs as root in namespaces of its own (tools/test-pods.sh makes them): processes, mounts, interfaces
and rules go with them.  Only the cgroups have to be removed by hand.
"""

import ctypes
import json
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from kube.control_plane import ControlPlane
from kube.fake_api import Object
from pods.names_server import NamesServer
from programs import run_program

from popmq.operator.model.names import HTTP_PORT

_LIBC = ctypes.CDLL(None)
NETWORK = "10.88.9"
GATEWAY = f"{NETWORK}.1"
CGROUPS = Path("/sys/fs/cgroup")


class Nodes:
    """`images` are OCI archives, which every node gets."""

    def __init__(self, plane: ControlPlane, folder: Path, images: Sequence[Path]) -> None:
        self._plane = plane
        self._folder = folder
        self._images = images
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._names: NamesServer | None = None

    def start(self, *names: str) -> None:
        self._names = NamesServer(self._plane, GATEWAY)
        self._names.start()
        for number, name in enumerate(names, start=1):
            self._start(name, number)
        self._run(
            "kube-proxy",
            [
                self._plane.assets / "kube-proxy",
                f"--kubeconfig={self._plane.folder}/admin.kubeconfig",
                "--proxy-mode=iptables",
                f"--cluster-cidr={NETWORK}.0/24",
                f"--hostname-override={names[0]}",
                # All pods share one bridge: answers would take a shorter way back.
                "--masquerade-all=true",
                "--conntrack-max-per-core=0",
                "--conntrack-tcp-timeout-established=0",
                "--conntrack-tcp-timeout-close-wait=0",
                "--healthz-bind-address=",
                f"--bind-address={GATEWAY}",
            ],
        )
        for name in names:
            wait = ("wait", "--for=condition=Ready", f"node/{name}", "--timeout=120s")
            self._plane.wait(
                name, lambda name=name: self._plane.get(f"/api/v1/nodes/{name}") is not None
            )
            self._plane.kubectl(*wait)

    def stop(self) -> None:
        """Kubelets first: they would start again what goes."""
        if self._names is not None:
            self._names.stop()
        for name in sorted(self.processes, reverse=True):
            self.processes[name].kill()
            self.processes[name].wait()
        for process in _below("popmq-*"):
            _kill(process)
        for folder in CGROUPS.glob("*/popmq-*"):
            _remove_cgroup(folder)

    def kill(self, name: str) -> None:
        """The machine is gone: kubelet, containers, all."""
        for part in (f"kubelet-{name}", f"containerd-{name}"):
            self.processes[part].kill()
            self.processes[part].wait()
        for process in _below(f"popmq-{name}"):
            _kill(process)

    def tag(self, name: str, image: str, other: str) -> None:
        """The same image under another name, as a new version of it would be."""
        socket = str(self._folder / name / "containerd.sock")
        command = ["ctr", "-a", socket, "-n", "k8s.io", "images", "tag", image, other]
        subprocess.run(command, check=True)

    def cut(self, address: str) -> str:
        """A pod's network cable, pulled: its name, for `mend`."""
        socket.create_connection((address, HTTP_PORT), timeout=5).close()  # now it is a neighbour
        neighbours = json.loads(_told("ip", "-json", "neigh", "show", address))
        cards = json.loads(_told("bridge", "-json", "fdb", "show", "br", "popmq0"))
        cables = [card["ifname"] for card in cards if card["mac"] == neighbours[0]["lladdr"]]
        _told("ip", "link", "set", cables[0], "down")
        return str(cables[0])

    def mend(self, cable: str) -> None:
        _told("ip", "link", "set", cable, "up")

    def said(self, since: datetime, until: datetime) -> list[str]:
        """What containers wrote to their logs then, in its order, for people."""
        results = self.logged(since, until)
        return [f"{at[11:23]} {pod}: {text[:300]}" for at, pod, text in results]

    def logged(self, since: datetime, until: datetime) -> list[tuple[str, str, str]]:
        """When, which pod, what; of containers that are gone, too, while their pod is there."""
        results = []
        for path in self._folder.glob("*/logs/*/*/*.log"):
            pod = path.parts[-3].split("_")[1]
            for line in path.read_text(errors="replace").splitlines():
                at, _, rest = line.partition(" ")
                if since <= datetime.fromisoformat(f"{at[:26].rstrip('Z')}+00:00") <= until:
                    results.append((at, pod, rest.partition(" F ")[2]))
        return sorted(results)

    def inside(self, pod: Object) -> int:
        """The first process of the pod's container; one that sleeps holds the pod's place."""
        results = _below(f"popmq-*/**/pod{pod['metadata']['uid']}")
        sleeps = {
            result: b"/sleep" in Path(f"/proc/{result}/cmdline").read_bytes() for result in results
        }
        return min(results, key=lambda number: (sleeps[number], number))

    def eat_memory(self, pod: Object, size: int) -> None:
        """A process of the pod's container takes so many bytes; should they not be there, the
        kernel is to take them from the container's own process."""
        owner = self.inside(pod)
        Path(f"/proc/{owner}/oom_score_adj").write_text("1000")
        (tasks,) = (
            path
            for path in CGROUPS.glob(
                f"memory/popmq-*/**/pod{pod['metadata']['uid']}/*/cgroup.procs"
            )
            if str(owner) in path.read_text().split()
        )
        script = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        script += "kept = b'x' * int(sys.argv[2])"
        command = [sys.executable, "-c", script, str(tasks), str(size)]
        subprocess.run(command, timeout=60, check=False)

    # -- one node

    def _start(self, name: str, number: int) -> None:
        where = self._folder / name
        for part in ("ctd", "cni", "kubelet", "logs", "plugins"):
            (where / part).mkdir(parents=True)
        address = f"{NETWORK}.{number}"
        if number > 1:
            subprocess.run(["ip", "addr", "add", f"{address}/24", "dev", "popmq0"], check=True)
        _make_cgroup(f"popmq-{name}")
        self._containerd(name, where)
        self._kubelet(name, where, address)

    def _containerd(self, name: str, where: Path) -> None:
        (where / "cni" / "10-popmq.conflist").write_text(
            f"""{{"cniVersion": "0.4.0", "name": "popmq", "plugins": [{{
              "type": "bridge", "bridge": "popmq0", "hairpinMode": true,
              "ipam": {{"type": "host-local", "dataDir": "{self._folder}/addresses",
                "ranges": [[{{"subnet": "{NETWORK}.0/24", "rangeStart": "{NETWORK}.20",
                  "gateway": "{GATEWAY}"}}]],
                "routes": [{{"dst": "0.0.0.0/0"}}]}}}}]}}"""
        )
        (where / "containerd.toml").write_text(
            textwrap.dedent(f"""\
                version = 2
                root = "{where}/ctd/root"
                state = "{where}/ctd/state"
                [grpc]
                address = "{where}/containerd.sock"
                [ttrpc]
                address = "{where}/containerd.sock.ttrpc"
                [plugins."io.containerd.grpc.v1.cri"]
                sandbox_image = "localhost/pause:1"
                restrict_oom_score_adj = true
                [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
                runtime_type = "io.containerd.runc.v2"
                [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
                SystemdCgroup = false
                [plugins."io.containerd.grpc.v1.cri".cni]
                bin_dir = "/usr/lib/cni"
                conf_dir = "{where}/cni"
                """)
        )
        self._run(
            f"containerd-{name}", ["containerd", "-c", where / "containerd.toml", "-l", "warn"]
        )
        control = ("ctr", "-a", str(where / "containerd.sock"), "-n", "k8s.io")
        self._plane.wait(
            "containerd",
            lambda: subprocess.run([*control, "version"], capture_output=True).returncode == 0,
        )
        for image in self._images:
            subprocess.run([*control, "images", "import", str(image)], check=True)

    def _kubelet(self, name: str, where: Path, address: str) -> None:
        (where / "kubelet.yaml").write_text(
            textwrap.dedent(f"""\
                kind: KubeletConfiguration
                apiVersion: kubelet.config.k8s.io/v1beta1
                address: {address}
                authentication:
                  anonymous: {{enabled: false}}
                  webhook: {{enabled: false}}
                  x509: {{clientCAFile: {self._plane.folder}/ca.crt}}
                authorization: {{mode: AlwaysAllow}}
                containerRuntimeEndpoint: unix://{where}/containerd.sock
                cgroupDriver: cgroupfs
                cgroupRoot: /popmq-{name}
                failSwapOn: false
                failCgroupV1: false
                enforceNodeAllocatable: []
                makeIPTablesUtilChains: false
                healthzPort: 0
                readOnlyPort: 0
                evictionHard: {{memory.available: "100Mi"}}
                imageGCHighThresholdPercent: 100
                nodeStatusUpdateFrequency: 2s
                syncFrequency: 2s
                volumePluginDir: {where}/plugins
                podLogsDir: {where}/logs
                resolvConf: ""
                clusterDNS: [{GATEWAY}]
                clusterDomain: cluster.local
                """)
        )
        self._run(
            f"kubelet-{name}",
            [
                self._plane.assets / "kubelet",
                f"--config={where}/kubelet.yaml",
                f"--kubeconfig={self._plane.folder}/{name}.kubeconfig",
                f"--root-dir={where}/kubelet",
                f"--cert-dir={where}/certificates",
                f"--hostname-override={name}",
                f"--node-ip={address}",
                f"--node-labels=topology.kubernetes.io/zone=zone-{name}",
            ],
        )

    def _run(self, name: str, command: Sequence[str | Path]) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,
            )


def _told(*command: str) -> str:
    return run_program(command, check=True).stdout


def network() -> None:
    """The bridge that all pods are on."""
    for command in (
        "ip link set lo up",
        "ip link add popmq0 type bridge",
        f"ip addr add {GATEWAY}/24 dev popmq0",
        "ip link set popmq0 up",
        "ip route add default dev popmq0",  # addresses of Services are nobody's
        "sysctl -qw net.ipv4.ip_forward=1",
    ):
        subprocess.run(command.split(), check=True)


def volume(name: str, node: str, folder: Path) -> Object:
    """A directory of one node, which fsGroup is applied to."""
    folder.mkdir(parents=True)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "20Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "local",
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": str(folder)},
            "nodeAffinity": {
                "required": {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [
                                {
                                    "key": "kubernetes.io/hostname",
                                    "operator": "In",
                                    "values": [node],
                                }
                            ]
                        }
                    ]
                }
            },
        },
    }


def _make_cgroup(name: str) -> None:
    """In each hierarchy of version 1; a new cpuset has no CPU before it is told of some."""
    for hierarchy in CGROUPS.iterdir():
        if not (hierarchy / "tasks").exists():
            continue
        path = hierarchy / name
        path.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / setting).exists():
                (path / setting).write_text((hierarchy / setting).read_text())
    if (CGROUPS / "cgroup.controllers").exists():
        (CGROUPS / name).mkdir(exist_ok=True)


def _remove_cgroup(folder: Path) -> None:
    for below in sorted(folder.rglob("*"), key=lambda path: -len(path.parts)):
        if below.is_dir():
            _remove_empty(below)
    _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    for _ in range(20):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.1)  # its last process is on its way
        else:
            return


def _below(cgroup: str) -> set[int]:
    sets: set[int] = set()
    for tasks in CGROUPS.glob(f"memory/{cgroup}/**/cgroup.procs"):
        sets |= {int(line) for line in tasks.read_text().split()}
    return sets - {0}


def _kill(process: int) -> None:
    subprocess.run(["kill", "-9", str(process)], check=False, capture_output=True)


def _die_with_parent() -> None:
    """PR_SET_PDEATHSIG is 1 (man 2 prctl)."""
    _LIBC.prctl(1, signal.SIGKILL)


def have_all() -> str:
    """What is missing, or nothing."""
    expected = ("containerd", "runc", "ctr", "ip", "iptables", "conntrack", "sysctl")
    missing = [name for name in expected if not shutil.which(name)]
    return ", ".join(missing)
