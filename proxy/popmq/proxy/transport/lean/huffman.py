"""Decodes HPACK's Huffman code a byte at a time (RFC 7541, section 5.2 and appendix B).

The steps of a byte are two of those that `hpack` makes for half a byte; they are joined when they
are first met.  So a value costs a look in a table for each of its bytes.
"""

from hpack.exceptions import HPACKDecodingError
from hpack.huffman_table import (
    HUFFMAN_COMPLETE,
    HUFFMAN_EMIT_SYMBOL,
    HUFFMAN_FAIL,
    HUFFMAN_TABLE,
)

_KEPT_STEPS = 16_384  # values of hexadecimal digits and dates meet some hundred

# By state and byte: the state behind it, what it decodes to, and whether the value may end there.
_STEPS: dict[int, tuple[int, bytes, bool]] = {}


def decode_huffman(coded: bytes) -> bytes:
    """Raises HPACKDecodingError for what is no Huffman code."""
    state, complete = 0, True
    steps = _STEPS
    decoded = []
    for byte in coded:
        key = state << 8 | byte
        state, text, complete = steps.get(key) or _step(key)
        decoded.append(text)
    if not complete:
        raise HPACKDecodingError("a Huffman code ends within a symbol")
    return b"".join(decoded)


def _step(key: int) -> tuple[int, bytes, bool]:
    state, flags, decoded = key >> 8, 0, b""
    for half in (key >> 4 & 0xF, key & 0xF):
        state, flags, symbol = HUFFMAN_TABLE[state * 16 + half]
        if flags & HUFFMAN_FAIL:
            raise HPACKDecodingError("a Huffman code that no symbol has")
        if flags & HUFFMAN_EMIT_SYMBOL:
            decoded += bytes((symbol,))
    if len(_STEPS) >= _KEPT_STEPS:
        _STEPS.clear()
    step = _STEPS[key] = state, decoded, flags & HUFFMAN_COMPLETE != 0
    return step
