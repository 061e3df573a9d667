"""Namespaces: the same topic and group names twice in one cluster.

A resource of a namespace has a whole name, `NAMESPACE%NAME` (RocketMQ's form); the brokers know
nothing else.  Clients that name a namespace write and read the short one.  Dead letters keep
their prefix in front: `%DLQ%NAMESPACE%GROUP`.
"""

import re
from functools import lru_cache

from popmq.common.errors import Code
from popmq.common.topics import (
    DLQ_PREFIX,
    check_form,
    group_of_dead_letters,
    is_group_owned,
    is_system_topic,
)

NAMESPACE_LIMIT = 64
SEPARATOR = "%"
_ALLOWED = re.compile(r"[|a-zA-Z0-9_-]+")


@lru_cache(maxsize=4_096)  # for those that are fine: a refusal is not kept
def check_namespace(namespace: str) -> None:
    """Raise BAD_REQUEST unless the name may be a namespace's."""
    check_form(namespace, "namespace", NAMESPACE_LIMIT, Code.BAD_REQUEST, _ALLOWED)


def wrap_namespace(namespace: str, name: str) -> str:
    """The name that the brokers know. What has the namespace already stays as it is, and so do
    system names, which are refused whoever says them."""
    prefix = namespace + SEPARATOR
    if not (namespace and name) or name.startswith(prefix) or _is_reserved(name):
        return name
    if group := group_of_dead_letters(name):
        return name if group.startswith(prefix) else f"{DLQ_PREFIX}{prefix}{group}"
    return prefix + name


def without_namespace(namespace: str, name: str) -> str | None:
    """What `wrap_namespace` was made of; None for a name that is not of this namespace."""
    prefix = namespace + SEPARATOR
    if name.startswith(prefix):
        return name.removeprefix(prefix)
    group = group_of_dead_letters(name)
    if group.startswith(prefix):
        return DLQ_PREFIX + group.removeprefix(prefix)
    return None


def namespace_of_name(name: str) -> str:
    """Of a whole name such as `team%orders`; empty: of none."""
    namespace, percent, rest = name.partition(SEPARATOR)
    return namespace if percent and rest else ""


def _is_reserved(name: str) -> bool:
    return is_system_topic(name) or is_group_owned(name) or name.startswith("CID_RMQ_SYS_")
