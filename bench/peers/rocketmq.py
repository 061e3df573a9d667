"""Apache RocketMQ: name server, broker and proxy apart, or broker and proxy in one JVM."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from bench.peers import remoting
from bench.peers.cache import ROCKETMQ, rocketmq_jars
from bench.peers.peer import QUEUES
from bench.peers.processes import Process, free_port, wait_for_port
from popmq.cli.load.consuming import Consumer, ConsumerSession, ConsumeStats
from popmq.cli.load.reactor import LoadError, Reactor
from popmq.cli.load.requests import AckTemplate, SendTemplate
from popmq.cli.load.sending import ClosedLoad, RocketMqSender
from popmq.cli.load.target import Target
from popmq.common.errors import PopmqError

HEAP = "2g"
TOPIC = GROUP = "bench"
BROKER = "broker-a"
READY_S = 120
# The shortest wait of a receive that its proxy allows is 5 s.
WAIT_MS, INVISIBLE_MS = 5_000, 300_000


class RocketMq:
    """`apart`: name server, broker, proxy. Else name server, and broker inside the proxy's JVM."""

    def __init__(self, *, apart: bool = True, sync: bool = True, warm_up: int = 200_000) -> None:
        flush = "SYNC_FLUSH" if sync else "ASYNC_FLUSH"
        self.name = f"RocketMQ {'apart' if apart else 'one JVM'} {'sync' if sync else 'async'}"
        how = "broker and proxy apart" if apart else "broker inside the proxy's JVM"
        self.settings = f"{ROCKETMQ}, {how}; flushDiskType={flush}; heaps of {HEAP}"
        self.warm_up = warm_up
        self._apart = apart
        self._flush = flush
        self._roles: list[Process] = []
        self._broker_port = 0
        self.endpoint = ""

    def start(self, folder: Path) -> None:
        jars = rocketmq_jars()
        names, self._broker_port, grpc, remote = _ports()
        self.endpoint = f"127.0.0.1:{grpc}"
        (folder / "namesrv.conf").write_text(f"listenPort={names}\n")
        (folder / "broker.conf").write_text(
            f"brokerClusterName=DefaultCluster\nbrokerName={BROKER}\nbrokerId=0\n"
            f"listenPort={self._broker_port}\nbrokerIP1=127.0.0.1\n"
            f"namesrvAddr=127.0.0.1:{names}\nstorePathRootDir={folder}/store\n"
            f"storePathCommitLog={folder}/store/commitlog\nflushDiskType={self._flush}\n"
            "haListenPort=0\nenablePropertyFilter=true\n"
        )
        (folder / "proxy.json").write_text(
            json.dumps(
                {
                    "rocketMQClusterName": "DefaultCluster",
                    "proxyMode": "cluster" if self._apart else "local",
                    "namesrvAddr": f"127.0.0.1:{names}",
                    "grpcServerPort": grpc,
                    "remotingListenPort": remote,
                }
            )
        )
        self._start_role(jars, folder, "namesrv", "NamesrvStartup", "-c", f"{folder}/namesrv.conf")
        wait_for_port(self._roles[-1], names)
        address = ("-n", f"127.0.0.1:{names}")
        broker = ("-c", f"{folder}/broker.conf")
        if self._apart:
            self._start_role(jars, folder, "broker", "BrokerStartup", *address, *broker)
            wait_for_port(self._roles[-1], self._broker_port)
            remoting.wait_until_registered(names, BROKER)
        mode = ("-pm", "cluster") if self._apart else ("-pm", "local", "-bc", broker[1])
        proxy = ("-pc", f"{folder}/proxy.json")
        self._start_role(jars, folder, "proxy", "ProxyStartup", *address, *mode, *proxy)
        wait_for_port(self._roles[-1], self._broker_port)
        wait_for_port(self._roles[-1], grpc)
        remoting.create_topic(self._broker_port, TOPIC, QUEUES, "NORMAL")
        remoting.create_group(self._broker_port, GROUP)
        self._wait_until_it_takes_sends()

    def _start_role(self, jars: Path, folder: Path, role: str, main: str, *args: str) -> None:
        heap = HEAP if role != "namesrv" else "256m"
        options = [f"-Xms{heap}", f"-Xmx{heap}", "-XX:+UseG1GC", f"-Duser.home={folder}"]
        exports = ["java.base/jdk.internal.ref", "java.base/sun.nio.ch"]
        options += [f"--add-exports={module}=ALL-UNNAMED" for module in exports]
        package = {"namesrv": "namesrv", "broker": "broker", "proxy": "proxy"}[role]
        start = f"org.apache.rocketmq.{package}.{main}"
        argv = ["java", "-server", *options, "-cp", f"{jars}/*", start, *args]
        self._roles.append(Process(role, argv, folder, {"ROCKETMQ_HOME": str(folder)}))

    def _wait_until_it_takes_sends(self) -> None:
        until = time.monotonic() + READY_S
        while True:
            reactor = Reactor()
            try:
                tally = ClosedLoad(reactor, self.lanes(reactor, 1, 128), 1).run(10, limit=1)
                if tally.done:
                    return
                why = ", ".join(tally.refusals)
            except PopmqError as error:
                why = str(error)
            finally:
                reactor.close()
            if time.monotonic() > until:
                raise LoadError(f"{self.name} took no message in {READY_S} s: {why}")
            time.sleep(0.5)

    def processes(self) -> Sequence[Process]:
        return self._roles

    def target(self) -> Target:
        return Target(self.endpoint, TOPIC, GROUP, (BROKER,))

    def lanes(self, reactor: Reactor, connections: int, body: int) -> Sequence[RocketMqSender]:
        template = SendTemplate(TOPIC, body)
        channels = self.target().connect(reactor, connections)
        return [RocketMqSender(channel, template) for channel in channels]

    def stored(self) -> int:
        queues = range(QUEUES)
        return sum(remoting.max_offset(self._broker_port, TOPIC, queue) for queue in queues)

    def consume(
        self, reactor: Reactor, connections: int, loops: int, seconds: float, *, acks: str
    ) -> ConsumeStats:
        target = self.target()
        channels = target.connect(reactor, connections)
        session = ConsumerSession(reactor, channels[0], GROUP, [TOPIC])
        receives = target.receives(wait_ms=WAIT_MS, invisible_ms=INVISIBLE_MS)
        ack = AckTemplate(TOPIC, GROUP)
        consumer = Consumer(reactor, channels, receives, ack, loops=loops, acks=acks)
        consumed = consumer.run(seconds)
        session.close()
        return consumed

    def stop(self) -> None:
        for process in reversed(self._roles):
            process.stop()
        self._roles.clear()


def _ports() -> tuple[int, int, int, int]:
    """Of the name server, the broker (which takes one two below as well), gRPC, remoting."""
    broker = free_port(beside=(-2, 1))
    others: set[int] = set()
    while len(others) < 3:
        port = free_port()
        if abs(port - broker) > 2:
            others.add(port)
    names, grpc, remote = others
    return names, broker, grpc, remote
