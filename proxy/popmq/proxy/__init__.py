"""The proxy: speaks the public gRPC API and keeps no state of its own."""
