"""AuthGate: asked before any handler, in every transport; inert while auth.mode is off.

`active` is the one attribute that a call looks at then.  Otherwise the caller is identified, the
needs of its request are decided (auth/rights.py), and a refusal ends the call before its handler
has seen it.  Mode `observe` refuses nothing, and counts and logs what `on` would refuse.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from popmq.common.address import host_of
from popmq.common.clock import Clock
from popmq.common.errors import Code, ConfigError, PopmqError
from popmq.common.settings.settings import Settings
from popmq.common.topics import TopicConfig
from popmq.common.users import AuthMode
from popmq.common.wire.meta_pb2 import ChangeUserReply, ChangeUserRequest
from popmq.proxy.auth.calls import AuthorizedCall, RevocableCall
from popmq.proxy.auth.clock_offsets import Fresh
from popmq.proxy.auth.failure_waits import FailureWaits
from popmq.proxy.auth.first_admin import create_first_admin
from popmq.proxy.auth.identity import AccessRefused, Identity, unauthorized, valid_secrets
from popmq.proxy.auth.policy import EVERY, Need, topic_need
from popmq.proxy.auth.quota_use import OpenPeers, QuotaUse
from popmq.proxy.auth.refusal_log import RefusalLog
from popmq.proxy.auth.remoting_rights import HEART_BEAT, HELD, REMOTING_RIGHTS, RemotingRequest
from popmq.proxy.auth.rights import MESSAGING, RIGHTS, Needs, Rights
from popmq.proxy.auth.sealing import KeyFile
from popmq.proxy.auth.user_follower import UserFollower
from popmq.proxy.auth.users import KnownUser, KnownUsers
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.rpc.convert import parse, status_only
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.namespaces import namespace_of
from popmq.proxy.transport.interface import Call, Method, MethodType, StreamListener

logger = logging.getLogger(__name__)

TICK_S = 1.0
CREATE, PUB = ("create",), ("pub",)


class AuthGate:
    """Implements `Access`."""

    def __init__(
        self,
        settings: Settings,
        brokers: BrokerPorts,
        clock: Clock,
        metrics: ProxyMetrics,
        topics: MetadataCache,
    ) -> None:
        """Raises ConfigError for a key file that cannot be used."""
        own = settings.auth
        self._key_file = KeyFile(own.key_file) if own.key_file else None
        keys = self._key_file.keys if self._key_file else None
        self.users = KnownUsers(settings.cluster.name, keys)
        self.follower = UserFollower(self.users, brokers, clock, self._answered)
        waits = FailureWaits(own.failure_wait_ms)
        self.identity = Identity(self.users, clock, own.skew_ms, waits)
        # A proxy of a cluster with users refuses every call until it knows them.
        self.active = keys is not None
        self._observes = False
        self._stale_ms = own.stale_ms
        self._is_stale = False
        # Topics that a call may create are looked for first, for users that may not create them.
        self._topics = topics if settings.topic.auto_create else None
        self._clock = clock
        self.peers = OpenPeers(clock)
        self._uses: dict[str, QuotaUse] = {}  # of users that called and have quotas
        self._metrics = metrics
        self._log = RefusalLog(metrics)
        self._open: dict[RevocableCall, None] = {}
        self._ticking: asyncio.TimerHandle | None = None
        self._cluster, self._admin_file = settings.cluster.name, own.admin_file
        self.ready = asyncio.Event()  # the users are known, and there are some if there must be

    def start(self) -> None:
        """Follow the owner's users; must be called on the loop."""
        self.follower.start()
        self._tick()

    def stop(self) -> None:
        self.follower.stop()
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
        self._log.flush()

    @property
    def enforces(self) -> bool:
        """Whether a call without a user is refused."""
        return self.active and not self._observes

    # -- the seam

    def guarded(self, method: Method) -> Callable[[Call, bytes], None]:
        """What a call goes to while the gate is active. Raises ConfigError without a row."""
        rights = rights_of(method)
        assert method.start is not None, f"{method.path} has no `start`"
        is_plain = method.path.startswith(MESSAGING)
        return partial(self._start, method, method.start, rights, is_plain)

    def guarded_open(self, method: Method) -> Callable[[Call], StreamListener]:
        rights = rights_of(method)
        assert method.open is not None, f"{method.path} has no `open`"
        return partial(self._open_stream, method, method.open, rights)

    def _start(
        self,
        method: Method,
        handler: Callable[[Call, bytes], None],
        rights: Rights,
        is_plain: bool,
        call: Call,
        data: bytes,
    ) -> None:
        try:
            user = self.identify(call)
            if user.has_quotas:
                call = self._use_of(user).admit(call, len(data))
            request = parse(rights.request, data)
            namespace = namespace_of(call.metadata)
            needs = list(dict.fromkeys(rights.needs(request, namespace)))
            entry = self.authorize(user, needs, call.peer)
            if rights.for_super is not None and (why := rights.for_super(request)):
                self._check_super(user, why)
            if user.shown_clock is not None:
                self._learn(user, user.shown_clock)
        except AccessRefused as refusal:
            self._log.add(refusal, host_of(call.peer), observed=self._observes)
            if self._observes:
                handler(call, data)
            else:
                self._refuse(method, call, data, refusal)
            return
        except PopmqError as error:
            self._refuse(method, call, data, error)
            return
        if method.shape is MethodType.SERVER_STREAM:
            secret = self.identity.secret_of(call)
            refusal_now = partial(refusal_of, method, data)
            call = self._revocable(refusal_now, call, user, needs, secret)
        elif not is_plain:
            shown = self._shown(rights, user, namespace, call.peer)
            call = AuthorizedCall(call, user.name, entry, shown)
        missing = self._perhaps_created(user, needs, call.peer) if is_plain else ()
        if missing:
            then = partial(handler, call, data)
            refuse = partial(self._refuse, method, call, data)
            self._once_they_exist(missing, then, refuse)
        else:
            handler(call, data)

    def _perhaps_created(self, user: KnownUser, needs: Sequence[Need], peer: str) -> Sequence[str]:
        """Topics that the call may create, and its user may not."""
        if self._topics is None:
            return ()
        host, known = host_of(peer), self._topics.known_topic
        return [
            need.name
            for need in needs
            if need.kind == "topic"
            and need.actions == PUB  # only a send creates one
            and need.name != EVERY
            and known(need.name) is None
            and not (
                user.creates_implicitly
                and user.policy.decide(topic_need(CREATE, need.name), host).allowed
            )
        ]

    def _once_they_exist(
        self,
        names: Sequence[str],
        then: Callable[[], None],
        refuse: Callable[[PopmqError], None],
    ) -> None:
        """Go on when all topics are there; none is created."""
        assert self._topics is not None, "there are names"

        def looked(topic: TopicConfig | PopmqError) -> None:
            if isinstance(topic, PopmqError):
                refuse(topic)
            elif len(names) > 1:
                self._once_they_exist(names[1:], then, refuse)
            else:
                then()

        self._topics.topic(names[0], looked)

    def admit_remoting(
        self,
        request: RemotingRequest,
        call: Call,
        refusal: Callable[[PopmqError], Sequence[bytes]],
        then: Callable[[Call], None],
    ) -> None:
        """Go on with the call, now or later, or refuse it later.

        Raises AccessRefused, or BAD_REQUEST for what cannot be read.
        """
        try:
            self.check_usable()
            user, secret = self.identity.identify_remoting(request, call)
            if user.has_quotas:
                call = self._use_of(user).admit(call, len(request.body))
            needs = list(dict.fromkeys(REMOTING_RIGHTS[request.code](request)))
            entry = self.authorize(user, needs, call.peer)
        except AccessRefused as refused:
            self.refuse_or_observe(refused, call.peer)
            then(call)
            return
        if request.code == HEART_BEAT:
            call = AuthorizedCall(call, user.name, entry)
        if request.code in HELD:
            call = self._revocable(refusal, call, user, needs, secret)
        missing = self._perhaps_created(user, needs, call.peer)
        if missing:
            refuse = partial(self._refuse_with, refusal, call)
            self._once_they_exist(missing, partial(then, call), refuse)
        else:
            then(call)

    @property
    def version(self) -> object:
        """Of all that `may_publish` looks at."""
        return self.active, self._observes, self.users.state

    def may_publish(self, user: str, topic: str, peer: str) -> bool:
        """Whether a client of that user may see half messages of the topic."""
        if not self.enforces:
            return True
        known = self.users.find(user)
        if known is None or known.config.disabled:
            return False
        return known.policy.decide(topic_need(PUB, topic), host_of(peer)).allowed

    def identify(self, call: Call) -> KnownUser:
        """Raises AccessRefused."""
        self.check_usable()
        return self.identity.identify(call)

    def check_usable(self) -> None:
        """Raises AccessRefused while this proxy cannot know who may what."""
        if self._is_stale or self.users.mode is None:
            raise AccessRefused(
                Code.HA_NOT_AVAILABLE,
                "stale",
                "this proxy cannot follow the users of the cluster now: no call is served until "
                "it does (auth.stale_ms)",
            )
        if self.users.keys is None:
            raise AccessRefused(
                Code.HA_NOT_AVAILABLE,
                "no_key",
                "auth.mode is on, and this proxy has no auth.key_file to check signatures with",
            )

    def _use_of(self, user: KnownUser) -> QuotaUse:
        use = self._uses.get(user.name)
        if use is None or use.quotas != user.config.quotas:
            use = QuotaUse(user.name, user.config.quotas, self._clock, self.peers)
            self._uses[user.name] = use
        return use

    def authorize(self, user: KnownUser, needs: Iterable[Need], peer: str) -> str:
        """The entry that allowed the last of the needs. Raises AccessRefused."""
        host, entry = host_of(peer), ""
        for need in needs:
            decision = user.policy.decide(need, host)
            if not decision.allowed:
                raise AccessRefused(
                    Code.FORBIDDEN,
                    "policy",
                    f"user {user.name} may not {need}",
                    user=user.name,
                    entry=decision.reason,
                )
            entry = decision.reason
        return entry

    def _check_super(self, user: KnownUser, why: str) -> None:
        if not user.config.is_super:
            raise AccessRefused(
                Code.FORBIDDEN,
                "policy",
                f"user {user.name} may not do that: {why}, so it is for Super users",
                user=user.name,
            )

    def refuse_or_observe(self, refusal: AccessRefused, peer: str) -> None:
        """Count and log it; raise it unless the mode is observe."""
        self._log.add(refusal, host_of(peer), observed=self._observes)
        if not self._observes:
            raise refusal

    def _refuse(self, method: Method, call: Call, data: bytes, error: PopmqError) -> None:
        self._refuse_with(partial(refusal_of, method, data), call, error)

    def _refuse_with(
        self, refusal: Callable[[PopmqError], Sequence[bytes]], call: Call, error: PopmqError
    ) -> None:
        self._metrics.refuse(error)
        for message in refusal(error):
            call.send(message)
        call.finish()

    def _shown(
        self, rights: Rights, user: KnownUser, namespace: str, peer: str
    ) -> Callable[[bytes], bytes] | None:
        """What leaves out of a reply what the user may not get."""
        if rights.reply is None or rights.shown is None or self._observes:
            return None
        reply_type, parts, host = rights.reply, rights.shown, host_of(peer)

        def may_see(needs: Needs, part: Any) -> bool:
            return all(user.policy.decide(need, host).allowed for need in needs(part, namespace))

        def shown(message: bytes) -> bytes:
            reply = reply_type.FromString(message)
            for name, needs in parts.items():
                values = getattr(reply, name)
                kept = [part for part in values if may_see(needs, part)]
                if len(kept) < len(values):
                    del values[:]
                    values.extend(kept)
            return reply.SerializeToString()

        return shown

    # -- streams and polls

    def _revocable(
        self,
        refusal: Callable[[PopmqError], Sequence[bytes]],
        call: Call,
        user: KnownUser,
        needs: Sequence[Need],
        secret: bytes,
    ) -> RevocableCall:
        revocable = RevocableCall(call, needs, refusal, self._over)
        self._bind(revocable, user, secret)
        self._open[revocable] = None
        return revocable

    def _bind(self, revocable: RevocableCall, user: KnownUser, secret: bytes) -> None:
        revocable.user, revocable.secret = user.name, secret

    def _over(self, revocable: RevocableCall) -> None:
        self._open.pop(revocable, None)

    def _open_stream(
        self,
        method: Method,
        open_: Callable[[Call], StreamListener],
        rights: Rights,
        call: Call,
    ) -> StreamListener:
        """Also while the gate is inactive: a stream may be open when it becomes active."""
        revocable = RevocableCall(call, (), partial(refusal_of, method, b""), self._over)
        self._open[revocable] = None
        refused = self._refusal_now(revocable)
        if refused is not None:
            self._metrics.refuse(refused)
            revocable.revoke(refused)
            return GuardedStream(self, revocable, None, rights)
        return GuardedStream(self, revocable, open_(revocable), rights)

    def name(self, revocable: RevocableCall, needs: Sequence[Need]) -> None:
        """The client of a stream names what it uses, in place of what it named before."""
        if not needs:
            return
        revocable.needs = set(needs)
        if self.active and (refused := self._refusal_now(revocable)) is not None:
            revocable.revoke(refused)

    def _refusal_now(self, revocable: RevocableCall) -> PopmqError | None:
        """Why the call may not go on; None while it may."""
        if not self.active:
            return None
        try:
            self.check_usable()
            user = self._user_of(revocable)
            self.authorize(user, revocable.needs, revocable.peer)
        except AccessRefused as refusal:
            self._log.add(refusal, host_of(revocable.peer), observed=self._observes)
            return None if self._observes else refusal
        return None

    def _user_of(self, revocable: RevocableCall) -> KnownUser:
        """The user as it is now; the date of its header was checked when the call began."""
        if not revocable.user:
            user = self.identity.identify(revocable)
            if user.has_quotas:
                self._use_of(user).admit(revocable, 0)
            self._bind(revocable, user, self.identity.secret_of(revocable))
            return user
        current = self.users.find(revocable.user)
        if current is None or current.config.disabled:
            raise unauthorized("disabled", f"user {revocable.user} is disabled", revocable.user)
        if revocable.secret not in valid_secrets(current, self._clock.wall_ms()):
            why = f"the secret of user {revocable.user} that signed this call is over"
            raise unauthorized("signature", why, revocable.user)
        self.identity.check_network(current, revocable.peer)
        return current

    # -- what the owner says

    def _answered(self, changed: bool) -> None:
        mode = self.users.mode
        self._is_stale = False
        self._observes = mode is AuthMode.OBSERVE
        was_active, self.active = self.active, mode is not AuthMode.OFF
        if changed:
            logger.info(
                "users are followed",
                extra={"mode": str(mode and mode.value), "version": self.users.state[1]},
            )
        if self.active and (self._open or not was_active):
            self._recheck()
        if self._admin_file and not len(self.users):
            self._create_first()
        else:
            self.ready.set()

    def _create_first(self) -> None:
        try:
            create_first_admin(self.users, self.follower, self._cluster, self._admin_file)
        except (ConfigError, OSError) as error:
            logger.error("the first user cannot be made", extra={"why": str(error)})

    def _recheck(self) -> None:
        if self._observes:
            return
        for revocable in tuple(self._open):
            refused = self._refusal_now(revocable)
            if refused is not None:
                self._metrics.refuse(refused)
                revocable.revoke(refused)

    def _learn(self, user: KnownUser, fresh: Fresh) -> None:
        """Record the clock offset of the user's clients."""
        assert fresh.learned is not None, "an offset is shown"
        user.shown_clock = None
        removed = [] if fresh.instead_of is None else [fresh.instead_of]
        kept = [offset for offset in user.offsets if offset not in removed]
        user.offsets, user.learns_clock = (*kept, fresh.learned), False
        change = ChangeUserRequest(
            kind=ChangeUserRequest.LEARN_CLOCK,
            name=user.name,
            add_offsets=[fresh.learned],
            remove_offsets=removed,
        )
        self.follower.change(change, partial(_log_learned, user.name, fresh.learned))

    def _tick(self) -> None:
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        heard_ms = self.follower.heard_ms
        if heard_ms is not None:
            self._is_stale = self._clock.boot_ms() - heard_ms > self._stale_ms
        self._log.flush()
        self.reload_keys()

    def reload_keys(self) -> None:
        """If the file has other keys now."""
        if self._key_file is not None and self._key_file.changed():
            self.users.replace_keys(self._key_file.keys)


class GuardedStream:
    """What the client of a bidirectional call says; implements `StreamListener`."""

    def __init__(
        self,
        gate: AuthGate,
        call: RevocableCall,
        listener: StreamListener | None,
        rights: Rights,
    ) -> None:
        """Without a listener the call is over: it was refused."""
        self._gate = gate
        self._call = call
        self._listener = listener
        self._rights = rights

    def message(self, data: bytes) -> None:
        if self._call.over or self._listener is None:
            return
        try:
            request = self._rights.request.FromString(data)
            namespace = namespace_of(self._call.metadata)
            self._gate.name(self._call, tuple(self._rights.needs(request, namespace)))
        except (DecodeError, PopmqError):
            pass  # the handler refuses it
        if not self._call.over:
            self._listener.message(data)

    def half_closed(self) -> None:
        if not self._call.over and self._listener is not None:
            self._listener.half_closed()


def rights_of(method: Method) -> Rights:
    rights = RIGHTS.get(method.path)
    if rights is None:
        raise ConfigError(f"{method.path} has no row in the table of rights: it cannot be served")
    return rights


def refusal_of(method: Method, data: bytes, error: PopmqError) -> Sequence[bytes]:
    if method.refusal is None:
        return (status_only(error),)
    return method.refusal(data, error)


def _log_learned(name: str, minutes: int, answer: ChangeUserReply | PopmqError) -> None:
    if isinstance(answer, PopmqError):
        logger.warning("a clock offset is not recorded", extra={"user": name, "why": str(answer)})
    else:
        logger.info("a clock offset is learned", extra={"user": name, "minutes": minutes})
