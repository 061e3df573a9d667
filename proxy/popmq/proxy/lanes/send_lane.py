"""SendLane: ordinary sends that came together, as entries of one request to each broker."""

from collections.abc import Callable, Sequence

from popmq.common.clock import Clock
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import PutResult, id_tail, plain_put_entry
from popmq.common.record.send_fingerprint import sender_hash
from popmq.common.settings.settings import MessageSettings
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.lanes.call_lane import CallLane, LaneAccess, Way
from popmq.proxy.lanes.ordinary_send import read_ordinary, remember
from popmq.proxy.messaging.placement import choose_queue
from popmq.proxy.messaging.send import SendMessage, refuse_send
from popmq.proxy.rpc.convert import single_sent_ok
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.rpc import Rpc
from popmq.proxy.transport.interface import Caller, LaneRun


class SendLane(CallLane[bytes, PutResult]):
    """Keeps the id of each message."""

    def __init__(
        self,
        sends: SendMessage,
        brokers: BrokerPorts,
        routes: MetadataCache,
        limits: MessageSettings,
        clock: Clock,
        metrics: ProxyMetrics,
        access: LaneAccess,
        on_client: Callable[[str, Caller], None],
        enabled: bool,
    ) -> None:
        name, general = "SendMessage", sends.start
        super().__init__(
            name, sends.puts, metrics, access, on_client, refuse_send, general, enabled
        )
        self._sends = sends
        self._brokers = brokers
        self._routes = routes
        self._limits = limits
        self._clock = clock
        self._client_id, self._sender = "", 0  # of the call before
        self._ways: dict[tuple[str, str], Way] = {}  # by topic and broker

    def read(self, run: LaneRun, start: int, stop: int) -> tuple[Way, bytes, bytes] | None:
        now_ms = self._clock.wall_ms()
        if run.client_id != self._client_id:
            self._client_id, self._sender = run.client_id, sender_hash(run.client_id)
        sender, peer = self._sender, run.peer
        message = read_ordinary(run.data, start, stop, self._limits, sender, peer, now_ms)
        if message is None:
            return None
        name, kind, message_id, group, tag_hash, head, properties = message
        topic = self._routes.known_topic(name)
        if topic is None or not topic.writable or not topic.type.accepts(kind):
            return None
        brokers = self._brokers.names()
        single = len(brokers) == 1 and not group
        places = brokers if single else self._sends.places(topic, group, brokers)
        if not places:
            return None
        broker, queue = choose_queue(group or message_id.decode(), places, topic.queues)
        if not self._brokers.has_master(broker):
            return None  # what stands in the way is for the general path to say
        port = self._brokers.port(broker)
        way = self._ways.get((name, broker))
        if way is None or way.topic is not topic or way.port is not port:
            way = Way(port, self._sends.head(topic), id_tail(topic.id), topic, broker)
            remember(self._ways, (name, broker), way)
        return way, plain_put_entry(kind, queue, tag_hash, message_id, head, properties), message_id

    def answers(self, kept: Sequence[bytes], results: Sequence[PutResult]) -> list[bytes]:
        answers = []
        stored = 0
        for message_id, result in zip(kept, results, strict=True):
            # A message that was sent before as another type gets that one's receipt.
            if result.code == Code.OK and not (result.message or result.due_ms):
                stored += 1
                answers.append(single_sent_ok(message_id, result))
            else:
                answers.append(b"")
        self._metrics.sends += stored
        return answers

    def settle_unusual(
        self, rpc: Rpc, way: Way, result: PutResult | PopmqError, at_once: bool
    ) -> None:
        assert way.topic is not None
        self._sends.settle_one(rpc, way.topic, way.broker, result, at_once)
