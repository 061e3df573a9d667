"""HTTP/2 and gRPC by ourselves, at microseconds a call (docs/concepts/transport.md)."""
