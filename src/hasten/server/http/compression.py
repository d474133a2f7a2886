"""Decompress request bodies according to their `Content-Encoding`."""

from __future__ import annotations

import zlib

from hasten.core.errors import InputError, TooLargeError

# zlib detects which of the two it is from the first bytes.
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the decompressed body, or raise if it is invalid or larger than `max_bytes`."""
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "deflate"):
        raise InputError(f"content-encoding '{encoding}' is not supported", hint="supported: gzip, deflate")
    decompressor = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        content = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InputError(f"the body is not valid {encoding}") from error
    if len(content) > max_bytes:
        raise TooLargeError(f"the body is larger than {max_bytes} bytes")
    if not decompressor.eof or decompressor.unused_data:
        raise InputError(f"the body is truncated {encoding}, or has data after its end")
    return content
