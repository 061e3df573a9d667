"""grpc.reflection, v1 and v1alpha, for grpcurl and its like; behind `proxy.reflection`.

Both versions have the same messages.  It tells the public services only, and the files that
they need.
"""

from collections.abc import Iterable

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import Default

from popmq.proxy.api import service_pb2
from popmq.proxy.rpc.wire_scan import LEN, BadWire, chunk, fields, scalar
from popmq.proxy.transport.interface import Call, GrpcStatus, Method, MethodType, StreamListener

VERSIONS = ("v1", "v1alpha")
PACKAGE = "apache.rocketmq.v2"
REQUEST_BYTES = 4_096
# Of ServerReflectionRequest.
_FILE_BY_NAME, _FILE_OF_SYMBOL, _LIST = 3, 4, 7
# Of ServerReflectionResponse.
_ASKED, _FILES, _SERVICES, _ERROR = 2, 4, 6, 7


class Reflection:
    def __init__(self) -> None:
        root: FileDescriptor = service_pb2.DESCRIPTOR
        self._own = root.package  # apart from that of an official client in the same process
        self._files = {file.name: file for file in _with_needed(root)}
        self._services = [f"{PACKAGE}.{name}" for name in root.services_by_name]

    def methods(self) -> list[Method]:
        name = "ServerReflection/ServerReflectionInfo"
        return [
            Method(
                f"/grpc.reflection.{version}.{name}",
                MethodType.BIDI_STREAM,
                open=self._open,
                max_bytes=REQUEST_BYTES,
            )
            for version in VERSIONS
        ]

    def _open(self, call: Call) -> StreamListener:
        return _Stream(self, call)

    def answer(self, data: bytes) -> bytes:
        """A ServerReflectionResponse. Raises BadWire for what is no request."""
        text = ""
        asked = 0
        for field in fields(data):
            if field.wire_type == LEN and field.number > 1:
                asked = field.number
                text = data[field.content : field.end].decode(errors="replace")
        return chunk(_ASKED, data) + self._reply(asked, text)

    def _reply(self, asked: int, text: str) -> bytes:
        if asked == _LIST:
            names = (chunk(1, chunk(1, name.encode())) for name in self._services)
            return chunk(_SERVICES, b"".join(names))
        file = self._files.get(text) if asked == _FILE_BY_NAME else None
        if asked == _FILE_OF_SYMBOL:
            file = self._file_of(text)
        if file is None:
            known = asked in (_FILE_BY_NAME, _FILE_OF_SYMBOL)
            code = GrpcStatus.NOT_FOUND if known else GrpcStatus.UNIMPLEMENTED
            error = f"{text[:100]} is unknown" if known else "there are no extensions"
            return chunk(_ERROR, scalar(1, code) + chunk(2, error.encode()))
        needed = (chunk(1, self._public(item)) for item in _with_needed(file))
        return chunk(_FILES, b"".join(needed))

    def _public(self, file: FileDescriptor) -> bytes:
        """The file with the package that clients call."""
        if file.package != self._own:
            return file.serialized_pb
        proto = FileDescriptorProto.FromString(file.serialized_pb)
        proto.package = PACKAGE
        for message in proto.message_type:
            self._rename(message)
        for method in (method for service in proto.service for method in service.method):
            method.input_type = self._renamed(method.input_type)
            method.output_type = self._renamed(method.output_type)
        return proto.SerializeToString()

    def _rename(self, message: DescriptorProto) -> None:
        for field in message.field:
            if field.type_name:
                field.type_name = self._renamed(field.type_name)
        for nested in message.nested_type:
            self._rename(nested)

    def _renamed(self, name: str) -> str:
        own = f".{self._own}."
        return f".{PACKAGE}.{name.removeprefix(own)}" if name.startswith(own) else name

    def _file_of(self, symbol: str) -> FileDescriptor | None:
        public = f"{PACKAGE}."
        if symbol.startswith(public):
            symbol = f"{self._own}.{symbol.removeprefix(public)}"
        try:
            file: FileDescriptor = Default().FindFileContainingSymbol(symbol)
        except KeyError:
            return None
        return self._files.get(file.name)


class _Stream:
    """Implements `interface.StreamListener`."""

    def __init__(self, reflection: Reflection, call: Call) -> None:
        self._reflection = reflection
        self._call = call

    def message(self, data: bytes) -> None:
        try:
            self._call.send(self._reflection.answer(data))
        except BadWire as error:
            self._call.finish(GrpcStatus.INVALID_ARGUMENT, f"no ServerReflectionRequest: {error}")

    def half_closed(self) -> None:
        self._call.finish()


def _with_needed(file: FileDescriptor) -> Iterable[FileDescriptor]:
    """The file and all that it imports, each once."""
    files = {file.name: file}
    waiting = [file]
    while waiting:
        for needed in waiting.pop().dependencies:
            if needed.name not in files:
                files[needed.name] = needed
                waiting.append(needed)
    return files.values()
