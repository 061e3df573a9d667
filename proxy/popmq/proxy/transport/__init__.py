"""How bytes of the public API reach the proxy and leave it."""
