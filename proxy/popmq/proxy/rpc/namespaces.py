"""The header x-mq-namespace: requests get whole names on their way in, replies short ones.

Only this module knows that a client has a namespace: every Resource of its request is renamed
before a handler sees it, and every Resource of what it is sent.  A client without the header
pays nothing and names every resource by its whole name (docs/concepts/namespaces.md).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from popmq.common.errors import Code, Refused
from popmq.common.namespaces import check_namespace, without_namespace, wrap_namespace
from popmq.proxy.api import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.rpc.convert import parse
from popmq.proxy.transport.interface import Call, ForwardedCall

HEADER = "x-mq-namespace"


def namespace_of(metadata: Mapping[str, str]) -> str:
    """Empty: none. Raises BAD_REQUEST when it can be no namespace's name."""
    namespace = metadata.get(HEADER, "").strip()
    if namespace:
        check_namespace(namespace)
    return namespace


class NamespaceTranslator:
    """One method's requests and replies, in one namespace."""

    def __init__(self, namespace: str, method: str) -> None:
        self.namespace = namespace
        self._request, self._reply = _messages(method)

    def inward(self, data: bytes) -> bytes:
        """The request with whole names. Raises BAD_REQUEST where it names another namespace."""
        request = parse(self._request, data)
        for resource in _resources(request):
            given = resource.resource_namespace
            if given not in ("", self.namespace):
                raise Refused(
                    Code.BAD_REQUEST,
                    f"namespace {given!r} of {resource.name!r} is not {self.namespace!r}, which "
                    f"the header {HEADER} names",
                )
            resource.name = wrap_namespace(self.namespace, resource.name)
            resource.resource_namespace = ""
        return request.SerializeToString()

    def outward(self, data: bytes) -> bytes:
        """The reply with short names; what is of no namespace, or of another, stays as it is."""
        reply = self._reply.FromString(data)
        for resource in _resources(reply):
            short = without_namespace(self.namespace, resource.name)
            if short is not None:
                resource.name, resource.resource_namespace = short, self.namespace
        return reply.SerializeToString()


class NamespaceCall(ForwardedCall):
    """A call of the transport, as a handler that knows whole names sees it."""

    def __init__(self, call: Call, outward: Callable[[bytes], bytes]) -> None:
        super().__init__(call)
        self._outward = outward

    def send(self, message: bytes) -> None:
        super().send(self._outward(message))


class _Field(NamedTuple):
    """A field whose messages are resources (`below` is None), or hold some."""

    name: str
    below: tuple["_Field", ...] | None


@lru_cache(maxsize=256)
def _messages(method: str) -> tuple[type[Message], type[Message]]:
    """Of a method of either public service; no name is in both."""
    for file in (service, admin_pb2):
        for item in file.DESCRIPTOR.services_by_name.values():
            if (methods_by_name := item.methods_by_name.get(method)) is not None:
                return GetMessageClass(methods_by_name.input_type), GetMessageClass(
                    methods_by_name.output_type
                )
    raise AssertionError(f"no public service has a method {method}")


def _resources(message: Message) -> Iterator[pb.Resource]:
    return _found(message, _fields(message.DESCRIPTOR))


def _found(message: Any, fields: tuple[_Field, ...]) -> Iterator[pb.Resource]:
    for field in fields:
        values = getattr(message, field.name)
        if isinstance(values, Message):
            values = (values,) if message.HasField(field.name) else ()
        for value in values:
            if field.below is None:
                yield value
            else:
                yield from _found(value, field.below)


@lru_cache(maxsize=256)
def _fields(kind: Descriptor) -> tuple[_Field, ...]:
    """The fields of a message type that lead to resources; the protocol has no recursive type."""
    fields = []
    for field in kind.fields:
        if field.message_type is None:
            continue
        if field.message_type is pb.Resource.DESCRIPTOR:
            fields.append(_Field(field.name, None))
        elif below := _fields(field.message_type):
            fields.append(_Field(field.name, below))
    return tuple(fields)
