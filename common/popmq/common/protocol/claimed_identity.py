"""Whether a request speaks for the broker that sent it, or for another one.

A proof of the cluster's secret covers the name and the broker group in a HELLO.  What a request
says of its sender has to be the same (docs/concepts/frames.md#authentication).
"""

from collections.abc import Callable, Mapping

from google.protobuf.message import DecodeError

from popmq.common.errors import PopmqError
from popmq.common.protocol.frames import Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.protocol.replication_payloads import decode_handshake
from popmq.common.wire import controller_pb2 as pb

SLAVE_KINDS = frozenset(
    {
        Kind.HANDSHAKE,
        Kind.FETCH,
        Kind.ACKED,
        Kind.READ_SNAPSHOT,
        Kind.TIMER_CHECK_POINT,
    }
)
Claim = tuple[str, str]  # the broker group and the node that a request names; empty: it names none


def _registered(body: bytes) -> Claim:
    broker = pb.RegisterRequest.FromString(body).broker
    return broker.broker, broker.node or broker.broker


_CLAIMS: Mapping[int, Callable[[bytes], Claim]] = {
    Kind.HANDSHAKE: lambda body: ("", decode_handshake(body).node),
    Kind.REGISTER: _registered,
    Kind.ALTER_SYNC_STATE_SET: lambda body: (
        pb.AlterSyncStateSetRequest.FromString(body).group,
        "",
    ),
    Kind.WATCH_GROUP: lambda body: (pb.WatchGroupRequest.FromString(body).group, ""),
    Kind.FAILOVER: lambda body: (pb.FailoverRequest.FromString(body).group, ""),
}
_CHECKED = SLAVE_KINDS | _CLAIMS.keys()


def checked_kinds(peer: Hello) -> frozenset[int]:
    """The requests of this peer that `foreign` is to be asked about."""
    return frozenset(_CHECKED) if peer.role is ProcessRole.BROKER and peer.group else frozenset()


def foreign(peer: Hello, own: Hello, kind: int, body: bytes) -> str:
    """Why the request is not the peer's to send; empty if it is, or if it cannot be read."""
    sender = f"broker {peer.name} of broker group {peer.group}"
    if kind in SLAVE_KINDS and own.group and own.group != peer.group:
        return f"{sender} may not copy the log of broker group {own.group}"
    if kind not in _CLAIMS:
        return ""
    try:
        group, node = _CLAIMS[kind](body)
    except (DecodeError, PopmqError):  # the handler refuses it
        return ""
    name = Kind(kind).name
    if group not in ("", peer.group):
        return f"{sender} may not send {name} for broker group {group[:100]}"
    if node not in ("", peer.name):
        return f"{sender} may not send {name} as node {node[:100]}"
    return ""
