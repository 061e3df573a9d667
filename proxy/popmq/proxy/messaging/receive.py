"""ReceiveMessage: a long poll, answered as a stream.

Clients disagree about queues (the Node client asks for queue 0 only, the Python one for any), so
the queue's number is ignored: a receive serves all queues of the topic, at every broker group,
beginning with the one that is named (`messaging/pop_with_notify.py`).
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from popmq.common.clock import Clock
from popmq.common.errors import PopmqError, Unavailable
from popmq.common.protocol.messaging_payloads import (
    ChangeRequest,
    Kind,
    PopReply,
    PopRequest,
    decode_pop_reply,
    encode_change,
    encode_pop,
)
from popmq.common.settings.settings import Settings
from popmq.common.topics import (
    SubscriptionGroup,
    TopicConfig,
    check_group_name,
    check_readable_topic_name,
    is_internal_topic,
)
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers.broker_ports import BrokerPorts, reachable_first
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.messaging.connection_limits import ConnectionLimits
from popmq.proxy.messaging.pop_with_notify import (
    BROKER_RESERVE_MS,
    Popped,
    PopWithNotify,
    PopWithNotifySet,
)
from popmq.proxy.rpc.convert import (
    delivery_time_part,
    duration_ms,
    name_of,
    parse,
    receive_parts,
    status_of,
    status_part,
)
from popmq.proxy.rpc.rpc import Answer, Rpc
from popmq.proxy.rpc.validate import (
    batch_limit,
    check_attempt_id,
    filter_of,
    poll_ms,
    receive_invisible_ms,
)

# Topic and group; and the client, where each receives lite topics of its own.
_Place = tuple[str, str, str]


def _call_later(seconds: float, then: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(seconds, then)


class ReceiveMessage:
    def __init__(
        self,
        brokers: BrokerPorts,
        routes: MetadataCache,
        settings: Settings,
        clock: Clock,
        limits: ConnectionLimits,
        later: Callable[[float, Callable[[], None]], object] = _call_later,
    ) -> None:
        self._later = later
        self._brokers = brokers
        self._routes = routes
        self._settings = settings
        self._clock = clock
        self._limits = limits
        self._turn = 0
        self._waiting: dict[Rpc, str | None] = {}  # the connection of one that may wait
        self._polls: dict[_Place, PopWithNotifySet] = {}
        self._draining = False

    def start(self, rpc: Rpc) -> None:
        request = parse(service.ReceiveMessageRequest, rpc.data)
        pop = self._pop_of(rpc, request)
        rpc.metrics.receives += 1
        rpc.metrics.long_polling += pop.poll_ms > 0
        self._wait(rpc, polls=pop.poll_ms > 0)
        try:
            self._ask(rpc, pop, self._choices(request.message_queue.broker.name))
        except PopmqError:
            self._over(rpc)
            raise

    def drain(self) -> None:
        """Answer the open polls with nothing, and later ones at once.

        A Java SimpleConsumer throws when its poll is cut off, so a proxy that stops does this
        before it closes connections.
        """
        self._draining = True
        for polls in self._polls.values():
            polls.stop()
        self._polls.clear()
        for rpc in tuple(self._waiting):
            self._over(rpc)
            rpc.cancel_requests()
            rpc.reply(*receive_parts((), store_host=b"", now_ms=self._clock.wall_ms()))

    def _wait(self, rpc: Rpc, *, polls: bool) -> None:
        connection = rpc.call.peer if polls else None
        if connection is not None:
            self._limits.begin_wait(connection)
        self._waiting[rpc] = connection
        rpc.metrics.waiting_receives = len(self._waiting)
        rpc.on_cancelled(partial(self._over, rpc))

    def _over(self, rpc: Rpc) -> None:
        connection = self._waiting.pop(rpc, None)
        if connection is not None:
            self._limits.end_wait(connection)
        rpc.metrics.waiting_receives = len(self._waiting)

    def refuse(self, _request: bytes, error: PopmqError) -> Sequence[bytes]:
        """Refusals travel as parts of the stream, the delivery time last, as in RocketMQ."""
        return status_part(status_of(error)), delivery_time_part(self._clock.wall_ms())

    def _pop_of(self, rpc: Rpc, request: service.ReceiveMessageRequest) -> PopRequest:
        topic, group = name_of(request.message_queue.topic), name_of(request.group)
        check_readable_topic_name(topic)
        check_group_name(group)
        check_attempt_id(request.attempt_id)
        limits = self._settings.pop
        asked = request.HasField("long_polling_timeout")
        invisible = request.HasField("invisible_duration")
        requested = request.filter_expression
        filter_type, expression = filter_of(requested.type, requested.expression)
        self._limits.check_filter(rpc.call.peer, filter_type, expression)
        return PopRequest(
            topic=topic,
            group=group,
            client_id=rpc.client_id,
            limit=batch_limit(request.batch_size, limits),
            invisible_ms=receive_invisible_ms(
                duration_ms(request.invisible_duration) if invisible else None,
                auto_renew=request.auto_renew,
                limits=limits,
            ),
            poll_ms=poll_ms(
                duration_ms(request.long_polling_timeout) if asked else None,
                rpc.call.remaining_ms(),
                0 if self._draining else self._settings.poll.max_ms,
                self._settings.poll.min_ms,
            ),
            auto_renew=request.auto_renew,
            filter_type=filter_type,
            expression=expression,
            attempt_id=request.attempt_id,
            reply_bytes=limits.reply_bytes,
        )

    def _choices(self, requested: str) -> Sequence[str]:
        """All brokers, beginning with the one that was named; without one each call begins with
        the next.  Those without a master come last."""
        names = self._brokers.names()
        if not names:
            raise Unavailable("no broker is known yet")
        self._turn += 1
        first = names.index(requested) if requested in names else self._turn % len(names)
        return reachable_first(self._brokers, (*names[first:], *names[:first]))

    def _ask(self, rpc: Rpc, pop: PopRequest, names: Sequence[str]) -> None:
        if len(names) == 1:
            self._wait_at(rpc, pop, names[0])
        else:
            # Of lite topics each client waits for its own: which kind this is has to be known.
            then = partial(rpc.run, self._topic_known, rpc, pop, names)
            self._routes.topic_of_receive(pop.topic, then)

    def _topic_known(
        self, rpc: Rpc, pop: PopRequest, names: Sequence[str], topic: TopicConfig | PopmqError
    ) -> None:
        if isinstance(topic, TopicConfig):
            # Of dead letters each broker group has a topic of its own.
            topic_id = 0 if is_internal_topic(topic.name) else topic.id
            then = partial(rpc.run, self._group_known, rpc, pop._replace(topic_id=topic_id), names)
            self._routes.group(pop.group, then)
        elif pop.poll_ms:
            self._over(rpc)
            raise topic
        else:
            self._look_at(rpc, pop, names, [])

    def _group_known(
        self, rpc: Rpc, pop: PopRequest, names: Sequence[str], group: SubscriptionGroup | PopmqError
    ) -> None:
        """A group that is not known may be made by the first receive."""
        if isinstance(group, SubscriptionGroup):
            pop = pop._replace(group_id=group.id)
        if pop.poll_ms:
            self._poll(rpc, pop, names)
        else:
            self._look_at(rpc, pop, names, [])

    def _look_at(
        self,
        rpc: Rpc,
        pop: PopRequest,
        names: Sequence[str],
        answers: Sequence[tuple[str, Popped]],
    ) -> None:
        """Take what the next one has, without waiting for anything there."""
        name = names[len(answers)]

        def answered(answer: Answer) -> None:
            popped = _popped(answer)
            seen = [*answers, (name, popped)]
            if isinstance(popped, PopReply) and popped.deliveries:
                self._end(rpc, pop, [(name, popped)])
            elif len(seen) < len(names):
                self._look_at(rpc, pop, names, seen)
            else:
                self._end(rpc, pop, seen)

        if not self._brokers.has_master(name):
            answered(Unavailable(f"broker {name} has no master now"))
            return
        rpc.send_request(
            self._brokers.port(name),
            Kind.POP,
            encode_pop(pop),
            BROKER_RESERVE_MS,
            answered,
        )

    def _wait_at(self, rpc: Rpc, pop: PopRequest, name: str) -> None:
        """At the only broker group."""
        then = partial(self._answered, rpc, pop, name)
        timeout_ms = pop.poll_ms + BROKER_RESERVE_MS
        rpc.send_request(self._brokers.port(name), Kind.POP, encode_pop(pop), timeout_ms, then)

    def _answered(self, rpc: Rpc, pop: PopRequest, name: str, answer: Answer) -> None:
        popped = _popped(answer)
        if isinstance(popped, PopReply) and popped.first_look:
            rpc.metrics.short_polling_hits += 1
        self._end(rpc, pop, [(name, popped)])

    def _poll(self, rpc: Rpc, pop: PopRequest, names: Sequence[str]) -> None:
        """Wait at every broker group that has a master, or at one while many wait."""
        names = [name for name in names if self._brokers.has_master(name)] or names[:1]
        topic = self._routes.known_topic(pop.topic)
        alone = topic is not None and topic.kind.waits_by_client
        place = (pop.topic, pop.group, pop.client_id if alone else "")
        limit = self._settings.poll.switch_poll_limit
        polls = self._polls.setdefault(place, PopWithNotifySet(limit))

        def ended(name: str, popped: Popped) -> None:
            self._poll_over(place, rpc)
            self._end(rpc, pop, [(name, popped)])

        rpc.on_cancelled(partial(self._poll_over, place, rpc))
        polls.start(rpc, PopWithNotify(rpc, pop, names, self._brokers, self._clock, ended))

    def _poll_over(self, place: _Place, rpc: Rpc) -> None:
        polls = self._polls.get(place)
        if polls is None:
            return
        polls.end(rpc)
        if not polls:
            self._polls.pop(place, None)

    def _end(self, rpc: Rpc, pop: PopRequest, answers: Sequence[tuple[str, Popped]]) -> None:
        """With the first answer that is no refusal, if there is one."""
        self._over(rpc)
        self._deliver(rpc, pop, *min(answers, key=_is_refusal))

    def _deliver(self, rpc: Rpc, pop: PopRequest, broker: str, reply: Popped) -> None:
        if isinstance(reply, PopmqError):
            raise reply
        if pop.auto_renew and reply.deliveries:
            handles = [delivery.handle for delivery in reply.deliveries]
            rpc.call.on_unread(partial(self._end_renewal, pop, broker, handles))
        rpc.metrics.received += len(reply.deliveries)
        # The broker's time of the pop: the reply left when the check point was durable.
        popped_ms = reply.popped_ms or self._clock.wall_ms()
        rpc.reply(*receive_parts(reply.deliveries, store_host=broker.encode(), now_ms=popped_ms))

    def _end_renewal(self, pop: PopRequest, broker: str, handles: Sequence[bytes]) -> None:
        """The client lives and may not have these deliveries: they end by the invisible time.

        One that was acked until then stays acked: the change of its duration is refused.
        """

        def change() -> None:
            for handle in handles:
                body = encode_change(ChangeRequest(pop.topic, pop.group, handle, 0, pop.group_id))
                port.request(Kind.CHANGE, body, BROKER_RESERVE_MS, lambda _: None)

        port = self._brokers.port(broker)
        invisible_ms = pop.invisible_ms or self._settings.pop.invisible_default_ms
        self._later(invisible_ms / 1_000, change)


def _popped(answer: Answer) -> Popped:
    return answer if isinstance(answer, PopmqError) else decode_pop_reply(answer)


def _is_refusal(answer: tuple[str, Popped]) -> bool:
    return isinstance(answer[1], PopmqError)
