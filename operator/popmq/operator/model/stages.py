"""How far pods of a cluster are with what they get in several rollouts."""

from enum import StrEnum


class PeerRequirement(StrEnum):
    """What a pod asks of its peers: a proof of the cluster's secret, or TLS.  ACCEPTED: the pod has
    it and uses it with peers that have it too, and serves the others: so a cluster of before gets
    it pod by pod."""

    NONE = "none"
    ACCEPTED = "accepted"
    REQUIRED = "required"


class UsersUse(StrEnum):
    """What proxies hold of users.  FIRST: also the first user, which they make together with
    auth.mode on, so that the cluster is never open."""

    NONE = "none"
    KEY = "key"
    FIRST = "first"
