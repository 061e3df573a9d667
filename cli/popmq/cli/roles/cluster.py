"""`popmq up --groups N --replicas R`: a whole cluster as processes of one machine.

One controller with its records in a file, N broker groups of R brokers, one proxy; each in a
process of its own with its own data folder and log, supervised.  Where everything is stands in
`<data>/cluster.json`.
"""

import asyncio
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from popmq.broker.node.broker_process import DataLock
from popmq.cli.roles.supervised_process import SupervisedProcess, word_of
from popmq.cli.terminal.output import columns
from popmq.common.errors import ConfigError, PopmqError
from popmq.common.protocol.cluster_secret import load_cluster_secret, make_cluster_secret
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frames import FrameSettings, Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.section import shown
from popmq.common.settings.settings import Settings, environment
from popmq.common.unix_socket import SOCKET_PATH_LIMIT
from popmq.common.wire import controller_pb2 as pb

logger = logging.getLogger(__name__)

LOCAL = "127.0.0.1:0"
HTTP = {"http.listen": LOCAL, "http.health_listen": ""}  # of a child with pages for us alone
SECRET_FILE = "cluster.secret"
LOOK_S = 0.1
SAY_S = 5.0
STATE_FILE = "cluster.json"

# Words of ready lines, and the settings that they tell.
_LISTENS = {
    "controller": "controller.listen",
    "frames": "broker.listen",
    "endpoint": "proxy.listen",
    "admin": "proxy.admin_listen",
}


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """How many broker groups, and brokers of each; `config` is the user's file, or empty."""

    groups: int
    replicas: int
    config: str = ""

    @property
    def brokers(self) -> list[tuple[str, str]]:
        """(group, node) of every broker."""
        names = [f"broker-{chr(ord('a') + number)}" for number in range(self.groups)]
        return [(name, f"{name}-{number}") for name in names for number in range(self.replicas)]


class Cluster:
    """`defaults` are settings (section.key -> text) for every role, as those of `popmq up`."""

    def __init__(
        self,
        settings: Settings,
        shape: ClusterSize,
        defaults: Mapping[str, str],
        *,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        # Each look at the controller is a connection of its own: no news.
        logging.getLogger(FramePort.__module__).setLevel(logging.WARNING)
        self._on_progress = on_progress
        self._settings = settings
        self._shape = shape
        self._defaults = defaults
        self._data = os.path.abspath(settings.broker.data)
        _check_folder(self._data, shape)
        self._lock = DataLock(self._data)
        os.makedirs(f"{self._data}/logs", exist_ok=True)
        self._ports: dict[tuple[str, str], str] = {}  # (process, setting): what it took first
        self._children: dict[str, SupervisedProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._secret = f"{self._data}/{SECRET_FILE}"
        make_cluster_secret(self._secret)
        self._frame_settings = FrameSettings(secret=load_cluster_secret(self._secret))
        self._sockets, self._own_sockets = _socket_folder(self._data, shape)

    # -- life

    async def start(self) -> None:
        """Return when every group has a master, and all its brokers in the SyncStateSet.

        Raises ChildFailed when a process does not come up.
        """
        await self._up(self._start_controller())
        for group, node in self._shape.brokers:
            self._start_broker(group, node)
        self._start_proxy()
        for child in list(self._children.values()):
            await self._up(child)
        await self._whole()

    async def failed(self) -> None:
        """Wait for a fault of the supervision itself; children that die are started again."""
        while self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._tasks.discard(task)
                task.result()

    async def stop(self) -> None:
        """Proxy, controller (nobody shall be elected now), masters, slaves; each ends cleanly."""
        masters = await self._masters()
        slaves = [node for _, node in self._shape.brokers if node not in masters]
        for names in (["proxy"], ["controller"], masters, slaves):
            stopping = [self._children[name] for name in names if name in self._children]
            await asyncio.gather(*(child.stop() for child in stopping))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._own_sockets:
            shutil.rmtree(self._sockets, ignore_errors=True)
        self._lock.release()

    def kill(self) -> None:
        for child in self._children.values():
            child.kill()

    @property
    def endpoint(self) -> str:
        return word_of(self._children["proxy"].ready_line, "endpoint")

    @property
    def admin_listens(self) -> str:
        """The address of the admin port, if it is no unix socket."""
        return word_of(self._children["proxy"].ready_line, "admin")

    def table(self) -> str:
        """Where each process is: its pid, its ports and its log."""
        rows = []
        for child in self._children.values():
            ports = {key: where for (name, key), where in self._ports.items() if name == child.name}
            http = ports.pop("http.listen", "-")
            listens = ", ".join(map(_shown_path, ports.values()))
            rows.append((child.name, child.pid, listens, http, os.path.basename(child.log)))
        table = columns(("PROCESS", "PID", "LISTENS", "HTTP", "LOG"), rows, optional=("HTTP",))
        return f"{table}\nlogs in {_shown_path(os.path.dirname(child.log))}"

    @property
    def metrics(self) -> str:
        return word_of(self._children["proxy"].ready_line, "metrics")

    # -- children

    def _start_controller(self) -> SupervisedProcess:
        folder = _make_folder(f"{self._data}/controller")
        settings = {"controller.store": "file", "controller.data": f"{folder}/records"}
        listens = {"controller.listen": self._socket("controller"), **HTTP}
        return self._child("controller", "controller", settings, listens)

    def _start_broker(self, group: str, node: str) -> SupervisedProcess:
        settings = {
            "broker.name": group,
            "broker.node": node,
            "broker.data": _make_folder(f"{self._data}/{node}"),
            "broker.advertise": "",
            "controller.addresses": self._ports["controller", "controller.listen"],
            "replication.replicas": str(self._shape.replicas),
        }
        listens = {"broker.listen": self._socket(node), **HTTP}
        return self._child(node, "broker", settings, listens)

    def _start_proxy(self) -> SupervisedProcess:
        requested = self._settings
        settings = {
            "proxy.advertise": requested.proxy.advertise,
            "proxy.transport": requested.proxy.transport,
            # The child runs elsewhere.
            "auth.key_file": _absolute(requested.auth.key_file),
            "auth.admin_file": _absolute(requested.auth.admin_file),
            "listen.open_to_anybody": shown(requested.listen.open_to_anybody),
            "controller.addresses": self._ports["controller", "controller.listen"],
        }
        listens = {
            "proxy.listen": requested.proxy.listen,
            "proxy.admin_listen": requested.proxy.admin_listen,
            "http.listen": requested.http.listen,
        }
        return self._child("proxy", "proxy", settings, listens)

    def _socket(self, name: str) -> str:
        return f"unix:{self._sockets}/{name}.sock"

    def _child(
        self, name: str, role: str, settings: Mapping[str, str], listens: Mapping[str, str]
    ) -> SupervisedProcess:
        """`listens` are the addresses of the first start; later ones keep what was taken."""

        def read_settings() -> Mapping[str, str]:
            own = {key: self._ports.get((name, key), first) for key, first in listens.items()}
            secret = {"cluster.secret_file": self._secret, "cluster.secret_required": "true"}
            return _variables({**self._defaults, **settings, **secret, **own})

        arguments = [role, *(("--config", self._shape.config) if self._shape.config else ())]
        log = f"{self._data}/logs/{name}.log"
        child = SupervisedProcess(name, arguments, read_settings, log, on_change=self._changed)
        self._children[name] = child
        task = asyncio.get_running_loop().create_task(child.run())
        self._tasks.add(task)
        return child

    async def _up(self, child: SupervisedProcess) -> None:
        """Wait for its ready line, or raise what any child failed with."""
        ready = asyncio.ensure_future(child.ready.wait())
        try:
            await asyncio.wait({ready, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    task.result()
        finally:
            ready.cancel()
        self._note_ports(child)
        self._changed()

    def _note_ports(self, child: SupervisedProcess) -> None:
        metrics = word_of(child.ready_line, "metrics").removeprefix("http://").split("/")[0]
        self._ports[child.name, "http.listen"] = metrics
        for word, key in _LISTENS.items():
            if where := word_of(child.ready_line, word):
                self._ports[child.name, key] = where

    # -- what the controller sees

    async def _whole(self) -> None:
        """Look until nothing is missing; say what is, now and then."""
        loop = asyncio.get_running_loop()
        time = loop.time()
        shape = self._shape
        while missing := _missing(shape, await self._listed()) or await self._not_joined():
            self._on_progress(missing)
            if loop.time() - time > SAY_S:
                time = loop.time()
                logger.info("waiting", extra={"for": missing})
            await asyncio.sleep(LOOK_S)
        self._on_progress("")
        # The owner of the topics hears of the others with its next heartbeat: a FIFO topic that is
        # made now spreads over all of them.
        await asyncio.sleep(2 * self._settings.controller.heartbeat_ms / 1000)

    async def _not_joined(self) -> str:
        """A group that does not have the topics of the cluster yet gets no messages."""
        answer = await self._ask(Kind.ROUTES, pb.RoutesRequest().SerializeToString())
        routes = pb.RoutesReply.FromString(answer or b"")
        joined = {broker.broker for broker in routes.brokers}
        missing = sorted({group for group, _ in self._shape.brokers} - joined)
        if not routes.owner:
            return "which group owns the topics is not decided"
        return f"{missing[0]} has not copied the topics" if missing else ""

    async def _masters(self) -> list[str]:
        return [
            member.broker.node
            for state in await self._listed()
            for member in state.members
            if member.role == pb.MASTER
        ]

    async def _listed(self) -> Sequence[pb.GroupState]:
        """Empty while the controller does not answer."""
        answer = await self._ask(Kind.LIST_REPLICAS, pb.ListReplicasRequest().SerializeToString())
        return list(pb.ListReplicasReply.FromString(answer or b"").groups)

    async def _ask(self, kind: Kind, body: bytes) -> bytes | None:
        """None while the controller does not answer."""
        where = self._ports.get(("controller", "controller.listen"))
        if where is None:
            return None
        hello = Hello(role=ProcessRole.TOOL, name="up", cluster=self._settings.cluster.name)
        port = FramePort(where, hello, settings=self._frame_settings, peer_name="controller")
        port.start()
        try:
            return await call(port, kind, body, 2_000)
        except PopmqError:
            return None
        finally:
            await port.close()

    # -- the state file

    def _changed(self) -> None:
        state = {
            "pid": os.getpid(),
            "groups": self._shape.groups,
            "replicas": self._shape.replicas,
            "processes": [self._shown(child) for child in self._children.values()],
        }
        path = f"{self._data}/{STATE_FILE}"
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            json.dump(state, file, indent=1)
        os.replace(f"{path}.tmp", path)

    def _shown(self, child: SupervisedProcess) -> Mapping[str, object]:
        ports = {key: where for (name, key), where in self._ports.items() if name == child.name}
        return {
            "name": child.name,
            "pid": child.pid,
            "starts": child.starts,
            "log": child.log,
            "listens": ports,
        }


def _missing(shape: ClusterSize, found_states: Sequence[pb.GroupState]) -> str:
    states = {state.group: state for state in found_states}
    for group in sorted({group for group, _ in shape.brokers}):
        state = states.get(group)
        members = [member for member in state.members if member.alive] if state else []
        if state is None or len(members) < shape.replicas:
            return f"{group}: {len(members)} of {shape.replicas} brokers are heard"
        if not any(member.role == pb.MASTER for member in members):
            return f"{group}: no master. {state.trouble}"
        in_sync = len(state.record.sync_state_set)
        if shape.replicas > 1 and in_sync < shape.replicas:
            return f"{group}: {in_sync} of {shape.replicas} brokers in sync"
    return ""


def _socket_folder(data: str, shape: ClusterSize) -> tuple[str, bool]:
    """A folder that only we may enter, and whether it is a temporary one.

    It lies beside the data, unless the paths would be longer than the kernel takes.
    """
    folder = f"{data}/sockets"
    longest = max(len(node) for _, node in [*shape.brokers, ("", "controller")])
    if len(os.fsencode(folder)) + longest + len("/.sock") > SOCKET_PATH_LIMIT:
        return tempfile.mkdtemp(prefix="popmq-"), True
    os.makedirs(folder, mode=0o700, exist_ok=True)
    os.chmod(folder, 0o700)
    return folder, False


def _make_folder(folder: str) -> str:
    os.makedirs(folder, exist_ok=True)
    return folder


def _check_folder(data: str, shape: ClusterSize) -> None:
    """A store of `popmq up` alone is none of a cluster's, and brokers with data do not vanish."""
    if os.path.isdir(f"{data}/commitlog"):
        raise ConfigError(
            f"{data} holds the store of a single broker: name another --data, or start it without "
            "--groups and --replicas"
        )
    known = read_shape(data)
    if known is not None and (shape.groups < known.groups or shape.replicas < known.replicas):
        raise ConfigError(
            f"{data} holds {known.groups} broker groups of {known.replicas}: --groups "
            f"{shape.groups} --replicas {shape.replicas} would leave some of them out"
        )


def read_shape(data: str) -> ClusterSize | None:
    """The shape of the cluster that was started in that folder before; None without one."""
    try:
        with open(f"{data}/{STATE_FILE}", encoding="utf-8") as file:
            state = json.load(file)
        return ClusterSize(int(state["groups"]), int(state["replicas"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{data}/{STATE_FILE} cannot be read: {error}") from error


def _absolute(path: str) -> str:
    return os.path.abspath(path) if path else ""


def _variables(settings: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of a child: ours, and these settings over it."""
    own = {f"POPMQ_{key.replace('.', '_').upper()}": text for key, text in settings.items()}
    return {**environment(), **own}


def _shown_path(where: str) -> str:
    """A path below the folder in which the user is, from there; anything else as it is."""
    kind, path = ("unix:", where[5:]) if where.startswith("unix:") else ("", where)
    below = os.path.isabs(path) and path.startswith(os.getcwd() + os.sep)
    return kind + os.path.relpath(path) if below else where
