"""The admin calls about users: checked, sealed here, and changed at the owner.

No reply holds a secret: the caller makes it and sends it here, once.  One can grant only what one
has, and only a Super user changes a Super user (docs/concepts/users.md).
"""

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from google.protobuf.message import Message

from popmq.common.clock import Clock
from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.user_records import policy_record, secret_record, user_of
from popmq.common.users import (
    SECRET_BYTES,
    AuthMode,
    PolicyEntry,
    SealedSecret,
    UserConfig,
    check_action,
    check_entry,
    check_quotas,
    check_user_name,
    split_resource,
)
from popmq.common.wire import admin_pb2 as own
from popmq.common.wire.meta_pb2 import ChangeUserReply, ChangeUserRequest, SecretRecord
from popmq.proxy.admin.admin_service import SERVICE
from popmq.proxy.auth.calls import AuthorizedCall
from popmq.proxy.auth.gate import AuthGate
from popmq.proxy.auth.identity import AccessRefused, is_local, valid_secrets
from popmq.proxy.auth.policy import Need, group_need, topic_need
from popmq.proxy.auth.sealing import SealingKeys
from popmq.proxy.auth.users import KnownUser
from popmq.proxy.rpc.convert import parse
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.rpc import Rpc
from popmq.proxy.transport.interface import Call, Method, MethodType

RESEALED_AT_ONCE = 50  # users in one call
ALTER_TRIES = 3
RETIRE_LIMIT_MS = 30 * 24 * 3_600_000
_SECRET = re.compile(r"[!-~]+")
_OK = own.Status(code=Code.OK, message="OK")


class UserAdmin:
    def __init__(self, access: AuthGate, cluster: str, clock: Clock, metrics: ProxyMetrics) -> None:
        self._access = access
        self._users = access.users
        self._cluster = cluster
        self._clock = clock
        self._metrics = metrics

    def methods(self) -> list[Method]:
        return [
            self._method("CreateUser", own.CreateUserRequest, own.UserReply, self._create),
            self._method("AlterUser", own.AlterUserRequest, own.UserReply, self._alter),
            self._method("DeleteUser", own.DeleteUserRequest, own.UserReply, self._delete),
            self._method("DescribeUser", own.DescribeUserRequest, own.UserReply, self._describe),
            self._method("ListUsers", own.ListUsersRequest, own.ListUsersReply, self._list),
            self._method("Grant", own.GrantRequest, own.UserReply, self._grant),
            self._method("Revoke", own.RevokeRequest, own.UserReply, self._revoke),
            self._method("SetUserClock", own.SetUserClockRequest, own.UserReply, self._clocks),
            self._method("CheckAccess", own.CheckAccessRequest, own.CheckAccessReply, self._check),
            self._method("SetAuthMode", own.SetAuthModeRequest, own.AuthModeReply, self._mode),
            self._method(
                "ResealSecrets", own.ResealSecretsRequest, own.ResealSecretsReply, self._reseal
            ),
        ]

    def _method(
        self,
        name: str,
        request: type[Message],
        reply: Callable[..., Message],
        handler: Callable[[Rpc, Any], None],
    ) -> Method:
        def refuse(_request: bytes, error: PopmqError) -> Sequence[bytes]:
            status = own.Status(code=error.code, message=str(error))
            return (reply(status=status).SerializeToString(),)

        def handle(rpc: Rpc) -> None:
            handler(rpc, parse(request, rpc.data))

        def start(call: Call, data: bytes) -> None:
            rpc = Rpc(call, data, self._metrics, refuse)
            rpc.run(handle, rpc)

        return Method(SERVICE + name, MethodType.UNARY, start=start)

    # -- changes

    def _create(self, rpc: Rpc, request: own.CreateUserRequest) -> None:
        check_user_name(request.name)
        caller = self._caller(rpc)
        entries = list(map(entry_of, request.entries))
        _check_may(caller, request.type == "super", entries)
        change = ChangeUserRequest(
            kind=ChangeUserRequest.CREATE,
            name=request.name,
            type=request.type,
            entries=map(policy_record, entries),
            networks=request.networks,
        )
        if request.secret:
            change.secret.CopyFrom(self._sealed(rpc, request.name, request.secret))
        self._change(rpc, change)

    def _alter(self, rpc: Rpc, request: own.AlterUserRequest, tries: int = ALTER_TRIES) -> None:
        """Decided again when the user changed meanwhile: a proxy that learns the clock of the
        user's clients changes it too."""
        epoch, version = self._users.state
        caller, target = self._caller(rpc), self._known(request.name)
        _check_may(caller, request.type == "super" or target.config.is_super, target.config.entries)
        if not 0 <= request.retire_ms <= RETIRE_LIMIT_MS:
            raise Refused(
                Code.BAD_REQUEST,
                f"a secret that ends in {request.retire_ms} ms: it takes 0 to {RETIRE_LIMIT_MS}",
            )
        check_quotas(request.quotas)
        if request.quotas:
            _check_may(caller, True, ())
        change = ChangeUserRequest(
            name=request.name,
            type=request.type,
            state=request.state,
            quotas=request.quotas,
            drop_secret=request.drop_secret,
            retire_ms=self._clock.wall_ms() + request.retire_ms,
            networks=request.networks,
            any_network=request.any_network,
            if_version=target.config.version,
        )
        if request.secret:
            change.secret.CopyFrom(self._sealed(rpc, request.name, request.secret))
        if request.state == "disabled" or request.type == "normal":
            self._check_keeps_super(request.name)

        def answered(answer: ChangeUserReply | PopmqError) -> None:
            if isinstance(answer, PopmqError):
                if answer.code is not Code.PRECONDITION_FAILED or tries <= 1:
                    raise answer
                again = partial(rpc.run, self._alter, rpc, request, tries - 1)
                self._access.follower.when_followed((epoch, version + 1), again)
                return
            self._changed(rpc, answer)

        self._access.follower.change(change, partial(rpc.run, answered))

    def _delete(self, rpc: Rpc, request: own.DeleteUserRequest) -> None:
        target = self._known(request.name)
        _check_may(self._caller(rpc), target.config.is_super, ())
        self._check_keeps_super(request.name)
        self._change(rpc, ChangeUserRequest(kind=ChangeUserRequest.DELETE, name=request.name))

    def _grant(self, rpc: Rpc, request: own.GrantRequest) -> None:
        target = self._known(request.name)
        entries = list(map(entry_of, request.entries))
        if not entries:
            raise Refused(Code.BAD_REQUEST, "the grant has no policy entry")
        _check_may(self._caller(rpc), target.config.is_super, entries)
        kind = ChangeUserRequest.GRANT
        records = map(policy_record, entries)
        self._change(rpc, ChangeUserRequest(kind=kind, name=request.name, entries=records))

    def _revoke(self, rpc: Rpc, request: own.RevokeRequest) -> None:
        """To revoke a Deny is to grant what it denies."""
        target = self._known(request.name)
        entries = list(map(entry_of, request.entries))
        gone = target.config.entries if request.all else entries
        denied = any(entry.deny for entry in gone)
        _check_may(self._caller(rpc), target.config.is_super or denied, ())
        change = ChangeUserRequest(
            kind=ChangeUserRequest.REVOKE,
            name=request.name,
            entries=map(policy_record, entries),
            revoke_all=request.all,
        )
        self._change(rpc, change)

    def _clocks(self, rpc: Rpc, request: own.SetUserClockRequest) -> None:
        target = self._known(request.name)
        _check_may(self._caller(rpc), target.config.is_super, target.config.entries)
        change = ChangeUserRequest(
            name=request.name,
            add_offsets=request.add,
            remove_offsets=request.remove,
            clock="learn" if request.learn else "",
        )
        self._change(rpc, change)

    def _mode(self, rpc: Rpc, request: own.SetAuthModeRequest) -> None:
        caller = self._caller(rpc)
        if caller is not None and not caller.config.is_super:
            raise _forbidden(caller, "change auth.mode", "it is for Super users")
        if request.mode == AuthMode.ON.value:
            self._check_can_ask()
        change = ChangeUserRequest(kind=ChangeUserRequest.SET_MODE, mode=request.mode)

        def changed(answer: ChangeUserReply | PopmqError) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            reply = own.AuthModeReply(status=_OK, mode=request.mode)
            rpc.reply(reply.SerializeToString())

        self._access.follower.change(change, partial(rpc.run, changed))

    def _reseal(self, rpc: Rpc, _request: own.ResealSecretsRequest) -> None:
        """Seal users' secrets with the first key, RESEALED_AT_ONCE users in one call."""
        self._access.reload_keys()
        keys = self._users.keys
        if keys is None:
            raise Refused(Code.PRECONDITION_FAILED, "this proxy has no auth.key_file")
        names = [user.name for user in self._users.configs() if _sealed_otherwise(user, keys.first)]
        reply = own.ResealSecretsReply(status=_OK, key=keys.first)
        self._reseal_next(rpc, keys, names[:RESEALED_AT_ONCE], reply)

    def _reseal_next(
        self, rpc: Rpc, keys: SealingKeys, names: Sequence[str], reply: own.ResealSecretsReply
    ) -> None:
        if not names:
            users = self._users.configs()
            reply.left = sum(len(_sealed_otherwise(user, keys.first)) for user in users)
            rpc.reply(reply.SerializeToString())
            return
        user = self._known(names[0])
        secrets_then = _sealed_otherwise(user.config, keys.first)
        change = ChangeUserRequest(
            kind=ChangeUserRequest.RESEAL,
            name=user.name,
            if_version=user.config.version,
            resealed=(
                secret_record(keys.reseal(secret, cluster=self._cluster, user=user.name))
                for secret in secrets_then
            ),
        )

        def changed(answer: ChangeUserReply | PopmqError) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            reply.resealed += len(secrets_then)
            self._reseal_next(rpc, keys, names[1:], reply)

        self._access.follower.change(change, partial(rpc.run, changed))

    def _change(self, rpc: Rpc, change: ChangeUserRequest) -> None:
        def changed(answer: ChangeUserReply | PopmqError) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            self._changed(rpc, answer)

        self._access.follower.change(change, partial(rpc.run, changed))

    def _changed(self, rpc: Rpc, answer: ChangeUserReply) -> None:
        reply = own.UserReply(status=_OK, user=user_to_wire(user_of(answer.user)))
        rpc.reply(reply.SerializeToString())

    def _sealed(self, rpc: Rpc, user: str, secret: str) -> SecretRecord:
        keys = self._users.keys
        if keys is None:
            raise Refused(
                Code.PRECONDITION_FAILED,
                "this proxy has no auth.key_file, and a secret is not stored without a key",
            )
        if not (rpc.call.encrypted or is_local(rpc.call.peer)):
            raise Refused(
                Code.BAD_REQUEST,
                "the secret came in plain text over the network: connect over TLS, and use another",
            )
        low, high = SECRET_BYTES
        if not low <= len(secret) <= high or not _SECRET.fullmatch(secret):
            raise Refused(
                Code.BAD_REQUEST,
                f"a secret of {len(secret)} characters: it takes {low} to {high} printable ones",
            )
        secret_id = f"s{secrets.token_hex(4)}"
        sealed = keys.seal(secret.encode(), cluster=self._cluster, user=user, secret_id=secret_id)
        return secret_record(sealed)

    # -- looks

    def _describe(self, rpc: Rpc, request: own.DescribeUserRequest) -> None:
        user = user_to_wire(self._known(request.name).config)
        rpc.reply(own.UserReply(status=_OK, user=user).SerializeToString())

    def _list(self, rpc: Rpc, _request: own.ListUsersRequest) -> None:
        users = list(map(user_to_wire, self._users.configs()))
        mode = self._users.mode or AuthMode.OFF
        reply = own.ListUsersReply(status=_OK, users=users, mode=mode.value)
        rpc.reply(reply.SerializeToString())

    def _check(self, rpc: Rpc, request: own.CheckAccessRequest) -> None:
        user = self._known(request.user)
        check_action(request.action)
        kind, name = split_resource(request.resource)
        if name.endswith("*") or kind == "namespace":
            raise Refused(
                Code.BAD_REQUEST,
                f"{request.resource!r} is not one resource: cluster, topic:NAME or group:NAME",
            )
        reply = own.CheckAccessReply(status=_OK)
        if user.config.disabled:
            reply.reason = f"user {user.name} is disabled"
        elif request.address and not user.may_call_from(request.address):
            reply.reason = f"user {user.name} may not call from {request.address}"
        else:
            need = _need(request.action, kind, name)
            reply.allowed, reply.reason = user.policy.decide(need, request.address)
        rpc.reply(reply.SerializeToString())

    # -- who asks, and whom it is about

    def _caller(self, rpc: Rpc) -> KnownUser | None:
        """None while auth.mode is off."""
        caller = rpc.call.user if isinstance(rpc.call, AuthorizedCall) else ""
        user = self._users.find(caller) if caller else None
        if user is None and self._access.enforces:
            raise Refused(Code.UNAUTHORIZED, "this call needs a user: it has no signature")
        return user

    def _known(self, name: str) -> KnownUser:
        user = self._users.find(name)
        if user is None:
            raise Refused(Code.NOT_FOUND, f"user {name[:100]} does not exist")
        return user

    def _check_can_ask(self) -> None:
        """Nobody could turn it off again without a Super user that can sign."""
        if self._users.keys is None:
            raise Refused(
                Code.PRECONDITION_FAILED,
                "this proxy has no auth.key_file to check signatures with: set it at every proxy "
                "first",
            )
        if not any(map(self._is_usable_super, self._users.configs())):
            raise Refused(
                Code.PRECONDITION_FAILED,
                "there is no enabled Super user with a secret that opens: no user could "
                "change anything (popmq user create admin --type super)",
            )

    def _check_keeps_super(self, name: str) -> None:
        if self._users.mode is not AuthMode.ON:
            return
        others = (user for user in self._users.configs() if user.name != name)
        target = self._users.find(name)
        if target is None or not target.config.is_super or any(map(self._is_usable_super, others)):
            return
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"user {name} is the last Super user that can sign, and auth.mode is on",
        )

    def _is_usable_super(self, config: UserConfig) -> bool:
        if not config.is_super or config.disabled:
            return False
        user = self._users.find(config.name)
        return user is not None and bool(valid_secrets(user, self._clock.wall_ms()))


def _sealed_otherwise(user: UserConfig, key: str) -> Sequence[SealedSecret]:
    return [secret for secret in user.secrets if secret.key != key]


def _need(action: str, kind: str, name: str) -> Need:
    if kind == "cluster":
        return Need((action,), kind)
    return topic_need((action,), name) if kind == "topic" else group_need((action,), name)


def _check_may(caller: KnownUser | None, for_super: bool, entries: Iterable[PolicyEntry]) -> None:
    """Raise FORBIDDEN unless the caller is a Super user, where that is needed, and has every
    right that the entries give."""
    if caller is None:
        return
    if for_super and not caller.config.is_super:
        raise _forbidden(caller, "do that", "it is for Super users")
    for entry in entries:
        if not entry.deny and not caller.policy.covers(entry):
            raise _forbidden(caller, f"grant `{entry}`", "it does not have all of that itself")


def _forbidden(caller: KnownUser, what: str, why: str) -> PopmqError:
    message = f"user {caller.name} may not {what}: {why}"
    return AccessRefused(Code.FORBIDDEN, "policy", message, user=caller.name)


def entry_of(entry: own.UserEntry) -> PolicyEntry:
    """Raises BAD_REQUEST."""
    converted = PolicyEntry(
        tuple(entry.resources), tuple(entry.actions), tuple(entry.networks), entry.deny
    )
    check_entry(converted)
    return converted


def user_to_wire(user: UserConfig) -> own.User:
    return own.User(
        name=user.name,
        type="super" if user.is_super else "normal",
        enabled=not user.disabled,
        secrets=[
            own.UserSecret(id=secret.id, key=secret.key, until_ms=secret.until_ms)
            for secret in user.secrets
        ],
        entries=[
            own.UserEntry(
                resources=entry.resources,
                actions=entry.actions,
                networks=entry.networks,
                deny=entry.deny,
            )
            for entry in user.entries
        ],
        networks=user.networks,
        clock_offsets=user.clock_offsets,
        learns_clock=user.learns_clock,
        version=user.version,
        quotas=user.quotas.limits(),
    )
