"""Bodies that come compressed, as `Content-Encoding` tells."""

from __future__ import annotations

import zlib

from hasten.core.errors import InputError, TooLargeError

# zlib's word for either of the two, told apart by their first bytes.
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32


def decompress(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """What was compressed, however little was sent of it, is no larger than anything else may be."""
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "deflate"):
        raise InputError(f"the body's encoding is '{encoding}'", hint="known: gzip, deflate")
    reader = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        content = reader.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise InputError(f"the body is not {encoding}") from error
    if len(content) > most_bytes:
        raise TooLargeError(f"the body is larger than {most_bytes} bytes")
    if not reader.eof or reader.unused_data:
        raise InputError(f"the body is not {encoding} to its end")
    return content
