"""What a user is after a CHANGE_USER of a proxy (docs/concepts/users.md).

The proxy has checked that the caller may make the change, and has sealed the secrets.
"""

from dataclasses import replace

from popmq.broker.meta.registry import Registry
from popmq.common.errors import Code, Refused
from popmq.common.protocol.user_records import policy_of, secret_of
from popmq.common.users import (
    SECRET_LIMIT,
    AuthMode,
    PolicyEntry,
    Quotas,
    SealedSecret,
    UserConfig,
    check_quotas,
    check_user,
    quotas_of,
    unique,
)
from popmq.common.wire.meta_pb2 import ChangeUserRequest

Change = ChangeUserRequest


def apply_change(registry: Registry, change: ChangeUserRequest) -> UserConfig | None:
    """Write the change; the user after it, or the one that was deleted; None for a mode."""
    registry.check_owns_users()
    old = registry.users.find(change.name)
    _check_version(change, old)
    match change.kind:
        case Change.SET_MODE:
            registry.set_auth_mode(_mode_of(change))
            return None
        case Change.DELETE:
            return registry.delete_user(change.name)
        case Change.CREATE:
            if old is not None:
                raise Refused(Code.BAD_REQUEST, f"user {change.name} exists already")
            created = changed_user(UserConfig(change.name), change)
            check_user(created)
            # First: a cluster that asks and has no user yet gets its first one again, and one that
            # has a user and does not ask would stay open.
            if change.mode:
                registry.set_auth_mode(_mode_of(change))
            return registry.put_user(created)
    old = registry.users.user(change.name)
    new = changed_user(old, change)
    return registry.put_user(new) if new != old else old


def _check_version(change: ChangeUserRequest, user: UserConfig | None) -> None:
    """What the proxy decided about must be what is changed."""
    if change.if_version and (user is None or user.version != change.if_version):
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"user {change.name[:100]} was changed meanwhile: try again",
        )


def _mode_of(change: ChangeUserRequest) -> AuthMode:
    try:
        return AuthMode(change.mode)
    except ValueError:
        modes = ", ".join(mode.value for mode in AuthMode)
        raise Refused(
            Code.BAD_REQUEST, f"auth.mode is one of {modes}, not {change.mode[:40]!r}"
        ) from None


def changed_user(old: UserConfig, change: ChangeUserRequest) -> UserConfig:
    """The user after the change, without its version."""
    match change.kind:
        case Change.GRANT:
            return replace(old, entries=_more_entries(old, change))
        case Change.REVOKE:
            return replace(old, entries=_remaining_entries(old, change))
        case Change.RESEAL:
            return replace(old, secrets=_resealed(old, change))
        case Change.LEARN_CLOCK:
            return _learned(old, change)
    offsets = [offset for offset in old.clock_offsets if offset not in change.remove_offsets]
    offsets += [offset for offset in change.add_offsets if offset not in offsets]
    learns = old.learns_clock
    if change.clock == "learn":
        offsets, learns = [], True
    elif offsets:
        learns = False
    return replace(
        old,
        is_super=_chosen(change.type, "super", "normal", "type", old.is_super),
        disabled=_chosen(change.state, "disabled", "enabled", "state", old.disabled),
        secrets=_changed_secrets(old, change),
        entries=_more_entries(old, change),
        networks=() if change.any_network else unique(change.networks) or old.networks,
        clock_offsets=tuple(sorted(offsets)),
        learns_clock=learns,
        quotas=_changed_quotas(old, change),
    )


def _more_entries(old: UserConfig, change: ChangeUserRequest) -> tuple[PolicyEntry, ...]:
    return tuple(dict.fromkeys((*old.entries, *map(policy_of, change.entries))))


def _remaining_entries(old: UserConfig, change: ChangeUserRequest) -> tuple[PolicyEntry, ...]:
    if change.revoke_all:
        return ()
    gone = set(map(policy_of, change.entries))
    if missing := [entry for entry in gone if entry not in old.entries]:
        raise Refused(
            Code.NOT_FOUND,
            f"user {old.name} has no policy entry `{missing[0]}` (popmq user show {old.name})",
        )
    return tuple(entry for entry in old.entries if entry not in gone)


def _learned(old: UserConfig, change: ChangeUserRequest) -> UserConfig:
    """Of two proxies that learn at once, the first sets it."""
    if old.learns_clock and not old.clock_offsets:
        return replace(old, clock_offsets=tuple(change.add_offsets), learns_clock=False)
    moved = [offset for offset in old.clock_offsets if offset in change.remove_offsets]
    if not moved:
        return old
    kept = [offset for offset in old.clock_offsets if offset not in moved]
    return replace(old, clock_offsets=tuple(sorted({*kept, *change.add_offsets})))


def _changed_secrets(old: UserConfig, change: ChangeUserRequest) -> tuple[SealedSecret, ...]:
    """A new secret comes first, and ends what was before it at `retire_ms`."""
    kept = [secret for secret in old.secrets if secret.id != change.drop_secret]
    if change.drop_secret and len(kept) == len(old.secrets):
        raise Refused(Code.NOT_FOUND, f"user {old.name} has no secret {change.drop_secret[:40]!r}")
    if change.HasField("secret"):
        kept = [
            replace(secret, until_ms=min(change.retire_ms, secret.until_ms or change.retire_ms))
            for secret in kept[: SECRET_LIMIT - 1]
        ]
        kept.insert(0, secret_of(change.secret))
    return tuple(kept)


def _changed_quotas(old: UserConfig, change: ChangeUserRequest) -> Quotas:
    check_quotas(change.quotas)
    return quotas_of({**old.quotas.limits(), **change.quotas})


def _resealed(old: UserConfig, change: ChangeUserRequest) -> tuple[SealedSecret, ...]:
    """The same secrets, with the same ends, under another key."""
    new = {secret.id: secret_of(secret) for secret in change.resealed}
    return tuple(
        replace(new[secret.id], until_ms=secret.until_ms) if secret.id in new else secret
        for secret in old.secrets
    )


def _chosen(text: str, yes: str, no: str, what: str, old: bool) -> bool:
    if text not in ("", yes, no):
        raise Refused(Code.BAD_REQUEST, f"a user's {what} is {yes} or {no}, not {text[:40]!r}")
    return text == yes if text else old
