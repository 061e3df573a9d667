"""As much of an object store as a client of S3 needs to write an object in parts."""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_BEGUN = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
_ENDED = b'<CompleteMultipartUploadResult><ETag>"x"</ETag></CompleteMultipartUploadResult>'


class ObjectStore:
    """A context manager; `objects` by their path, which begins with the bucket."""

    def __init__(self) -> None:
        objects = self.objects = dict[str, bytes]()
        self.users = users = set[str]()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                self._answer(_BEGUN if self.path.endswith("?uploads") else _ENDED)

            def do_PUT(self) -> None:
                sent = _unchunked(self) if "chunked" in str(self.headers) else b""
                sent = sent or self.rfile.read(int(self.headers.get("content-length") or 0))
                objects[self.path.split("?")[0]] = sent
                match = re.search(r"Credential=(\w+)/", self.headers["authorization"])
                users.add(match[1] if match else "")
                self._answer(b"")

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("ETag", '"x"')
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "ObjectStore":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _unchunked(request: BaseHTTPRequestHandler) -> bytes:
    """The content of HTTP's chunks, and in it that of S3's."""
    framed = b""
    while size := int(request.rfile.readline().split(b";")[0], 16):
        framed += request.rfile.read(size)
        request.rfile.readline()
    request.rfile.readline()
    content = b""
    while framed:
        head, _, framed = framed.partition(b"\r\n")
        size = int(head.split(b";")[0], 16)
        if not size:
            break
        content, framed = content + framed[:size], framed[size + 2 :]
    return content
