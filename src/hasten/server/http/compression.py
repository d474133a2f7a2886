"""Decompress request bodies according to their `Content-Encoding`, in bounded steps."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from hasten.core.errors import InputError, TooLargeError

# zlib detects which of the two it is from the first bytes.
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
_STEP_BYTES = 2**18
# Apache's limit (DeflateInflateRatioLimit). Text compresses 3 to 10 times, and one text repeated many times more than
# any limit, so the first bytes of a body, up to the second number, are not held to it.
_MAX_RATIO, _MIN_LIMIT_BYTES = 200, 2**20


def decompress(body: bytes, encoding: str, max_bytes: int, reserve: Callable[[int], None] = lambda _: None) -> bytes:
    """Return the decompressed body; raise if it is invalid, larger than `max_bytes`, or compressed beyond measure.

    `reserve` is called with the size of each step, and may raise to stop.
    """
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "deflate"):
        raise InputError(f"content-encoding '{encoding}' is not supported", hint="supported: gzip, deflate")
    decompressor = zlib.decompressobj(_GZIP_OR_ZLIB)
    parts: list[bytes] = []
    rest, size = body, 0
    while not decompressor.eof:
        try:
            part = decompressor.decompress(rest, min(_STEP_BYTES, max_bytes - size + 1))
        except zlib.error as error:
            raise InputError(f"the body is not valid {encoding}") from error
        rest, size = decompressor.unconsumed_tail, size + len(part)
        if size > max_bytes:
            raise TooLargeError(f"the body is larger than {max_bytes} bytes")
        # Of what was read so far, so that a bomb is not inflated further.
        if size > max(_MIN_LIMIT_BYTES, _MAX_RATIO * (len(body) - len(rest))):
            raise TooLargeError(f"the body is compressed more than {_MAX_RATIO}:1")
        if not part and not decompressor.eof:
            break
        reserve(len(part))
        parts.append(part)
    if not decompressor.eof or decompressor.unused_data:
        raise InputError(f"the body is truncated {encoding}, or has data after its end")
    return b"".join(parts)
