"""Batches and outputs in memory that two processes share, without pickling.

A region holds one batch or its outputs as plain arrays; the message beside it, on a Unix socket, says what they are:

batch    lengths (rows), then each input (tokens), all of one integer type; their order is that of the signature
outputs  each output at a multiple of 64 bytes, in the order of the signature

Processes take turns: the one that has the turn may write, and make the region larger, never smaller. Sizes and types
come from another process, so each reader checks them against its own limits and the size of the region.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from hasten.core import errors
from hasten.core.errors import HastenError, OverloadedError, StageError
from hasten.core.tensors import ATTENTION_MASK, Batch, FloatArray, Outputs, Signature

# The control words at the start of a region, and the alignment of outputs.
_ALIGNMENT = 64
_MIN_REGION_BYTES = 2**20
_MAX_REGION_BYTES = 2**33
# More than a batch may have by far, and a copy of them is no strain: the queue of the engine process splits batches.
_MAX_TOKENS = 2**23
_MAX_OUTPUTS = 16
_MAX_DIMS = 4
_MAX_ERROR_CHARS = 2048
# A message fits into this buffer, whatever it says.
MESSAGE_BYTES = 2**15

_INTEGERS: Final = (np.dtype(np.int32), np.dtype(np.int64))
_DTYPES: Final = tuple(
    np.dtype(kind) for kind in (np.float32, np.float16, np.float64, np.int32, np.int64, np.int8, np.uint8, np.bool_)
)
_DTYPE_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}

# Number of the batch, its rows and tokens, the code of its integer type, whether it runs alone.
_BATCH = struct.Struct("<IIIBB2x")
# Number of the batch, size of the rest of the message in bytes, number of outputs; 255 outputs stand for an error.
_REPLY = struct.Struct("<IHB1x")
# Code of the type, number of dimensions, and the dimensions.
_OUTPUT = struct.Struct("<BB2x4I")
_ERROR = 255
_NO_DIMS = (0,) * _MAX_DIMS


class ProtocolError(HastenError):
    """The other process sent a message that does not fit the region, the limits or the order of messages."""


class Region:
    """Shared memory behind a file descriptor, mapped as far as was needed. One thread uses it at a time."""

    def __init__(self, fd: int) -> None:
        """Map the region; it owns the file descriptor from then on."""
        self.fd = fd
        self._size = 0
        self.cover(1)

    @classmethod
    def create(cls) -> Region:
        """Return a new region. It has no name that other processes could open."""
        fd = _anonymous_file()
        os.ftruncate(fd, _MIN_REGION_BYTES)
        return cls(fd)

    def reserve(self, size: int) -> None:
        """Make the region large enough to write this many bytes."""
        if size <= self._size:
            return
        if size > _MAX_REGION_BYTES:
            raise StageError(f"a batch has {size} bytes; at most {_MAX_REGION_BYTES} can be passed between processes")
        os.ftruncate(self.fd, max(os.fstat(self.fd).st_size, 2 ** (size - 1).bit_length()))
        self._map()

    def cover(self, size: int) -> None:
        """Map this many bytes to read them; raise ProtocolError if the region is smaller."""
        if size <= self._size:
            return
        if size > min(os.fstat(self.fd).st_size, _MAX_REGION_BYTES):
            raise ProtocolError(f"a message claims {size} bytes of a smaller region")
        self._map()

    def close(self) -> None:
        """Close the file descriptor. Arrays that are still in use keep the memory."""
        with suppress(OSError):
            os.close(self.fd)

    @property
    def is_running(self) -> bool:
        """Return whether the batch in the region has started to run; that outlives the process that has set it."""
        return bool(self.words[0])

    @is_running.setter
    def is_running(self, value: bool) -> None:
        self.words[0] = value

    def _map(self) -> None:
        self._size = min(os.fstat(self.fd).st_size, _MAX_REGION_BYTES)
        self.memory = mmap.mmap(self.fd, self._size)
        self.words = memoryview(self.memory)[:_ALIGNMENT].cast("q")
        data = np.frombuffer(self.memory, np.uint8, offset=_ALIGNMENT)
        self.integers = [data.view(dtype) for dtype in _INTEGERS]


@dataclass(frozen=True, slots=True)
class BatchFormat:
    """The inputs and outputs of a model in the order of its signature."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, signature: Signature) -> BatchFormat:
        """Return the format of a model. The mask is not an input of batches: a session derives it."""
        inputs = tuple(spec.name for spec in signature.inputs if spec.name != ATTENTION_MASK)
        outputs = tuple(spec.name for spec in signature.outputs)
        if len(outputs) > _MAX_OUTPUTS:
            raise StageError(f"a model with {len(outputs)} outputs cannot be served by an engine process")
        return cls(inputs, outputs)


class ReceivedBatch(msgspec.Struct, frozen=True):
    """A batch as the engine process received it, copied out of the region."""

    number: int
    batch: Batch
    tokens: int
    # Whether it must not be merged with other batches.
    is_suspect: bool


def write_batch(region: Region, form: BatchFormat, batch: Batch, number: int, *, is_suspect: bool) -> bytes:
    """Write a batch to the region and return its message."""
    columns = [batch.values[name] for name in form.inputs]
    rows, tokens = len(batch.lengths), len(columns[0])
    code = 0 if all(column.itemsize <= 4 for column in columns) else 1
    end = rows + tokens * len(columns)
    region.reserve(_ALIGNMENT + end * _INTEGERS[code].itemsize)
    items = region.integers[code]
    items[:rows] = batch.lengths
    start = rows
    for column in columns:
        items[start : start + tokens] = column
        start += tokens
    region.is_running = False
    return _BATCH.pack(number, rows, tokens, code, is_suspect)


def read_batch(region: Region, form: BatchFormat, message: bytes) -> ReceivedBatch:
    """Copy the batch out of the region; raise ProtocolError if it does not fit the limits."""
    if len(message) != _BATCH.size:
        raise ProtocolError(f"a message has {len(message)} bytes instead of {_BATCH.size}")
    number, rows, tokens, code, is_suspect = _BATCH.unpack(message)
    if not (0 < rows <= tokens <= _MAX_TOKENS and code < len(_INTEGERS)):
        raise ProtocolError(f"a message claims {rows} rows and {tokens} tokens of type {code}")
    inputs = form.inputs
    end = rows + tokens * len(inputs)
    region.cover(_ALIGNMENT + end * _INTEGERS[code].itemsize)
    items = region.integers[code][:end].copy()
    lengths = items[:rows]
    counts = lengths.tolist()
    if min(counts) < 1 or sum(counts) != tokens:
        raise ProtocolError(f"the lengths of {rows} rows do not add up to {tokens} tokens")
    values = {name: items[rows + i * tokens : rows + (i + 1) * tokens] for i, name in enumerate(inputs)}
    return ReceivedBatch(number, Batch(values, lengths), tokens, bool(is_suspect))


def write_outputs(region: Region, form: BatchFormat, outputs: Outputs, number: int) -> bytes:
    """Write outputs to the region, over the batch that they answer, and return their message."""
    parts, offset, size = [b""], _ALIGNMENT, 0
    values = [outputs[name] for name in form.outputs]
    for value in values:
        size += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
    region.reserve(_ALIGNMENT + size)
    for value in values:
        ndim, code = value.ndim, _DTYPE_CODES.get(value.dtype)
        if code is None or ndim > _MAX_DIMS:
            raise StageError(f"an output of type {value.dtype} and {ndim} dimensions cannot leave the engine process")
        np.ndarray(value.shape, value.dtype, region.memory, offset)[...] = value
        parts.append(_OUTPUT.pack(code, ndim, *value.shape, *_NO_DIMS[ndim:]))
        offset += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
    parts[0] = _REPLY.pack(number, _OUTPUT.size * len(values), len(values))
    return b"".join(parts)


def message_bytes(message: memoryview) -> int:
    """Return the size of the message that begins so, or of the part that must be read to know it."""
    if len(message) < _REPLY.size:
        return _REPLY.size
    size: int = _REPLY.unpack_from(message)[1]
    return _REPLY.size + size


def read_outputs(region: Region, form: BatchFormat, message: memoryview, number: int) -> Outputs:
    """Copy the outputs out of the region, or raise the error that the engine process reports."""
    answered, size, count = _REPLY.unpack_from(message)
    if answered != number or len(message) != _REPLY.size + size:
        raise ProtocolError(f"batch {number} is answered with {len(message)} bytes for batch {answered}")
    if count == _ERROR:
        raise read_error(message[_REPLY.size :])
    if count != len(form.outputs) or size != count * _OUTPUT.size:
        raise ProtocolError(f"{count} outputs in {size} bytes instead of {len(form.outputs)} outputs")
    outputs: dict[str, FloatArray] = {}
    offset = _ALIGNMENT
    for name, (code, ndim, *dims) in zip(form.outputs, _OUTPUT.iter_unpack(message[_REPLY.size :]), strict=True):
        if code >= len(_DTYPES) or ndim > _MAX_DIMS:
            raise ProtocolError(f"the output '{name}' has type {code} and {ndim} dimensions")
        shape, dtype = tuple(dims[:ndim]), _DTYPES[code]
        nbytes = math.prod(shape) * dtype.itemsize
        region.cover(offset + nbytes)
        outputs[name] = np.ndarray(shape, dtype, region.memory, offset).copy()
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return outputs


class _ErrorMessage(msgspec.Struct, frozen=True):
    kind: str
    message: str
    hint: str | None = None
    retry_after_s: float | None = None


# The classes that may be named in a message; all but OverloadedError take a message and a hint.
_ERROR_KINDS: Final[dict[str, type[HastenError]]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, HastenError) and kind is not OverloadedError
}


def write_error(error: HastenError, number: int) -> bytes:
    """Return the message of an error; a subclass that only some module knows becomes the class in `core/errors.py`."""
    names = (kind.__name__ for kind in type(error).__mro__)
    kind = next(name for name in names if name in _ERROR_KINDS or name == OverloadedError.__name__)
    after_s = error.retry_after_s if isinstance(error, OverloadedError) else None
    hint = error.hint and error.hint[:_MAX_ERROR_CHARS]
    text = msgspec.json.encode(_ErrorMessage(kind, error.message[:_MAX_ERROR_CHARS], hint, after_s))
    return _REPLY.pack(number, len(text), _ERROR) + text


def read_error(text: bytes | memoryview) -> HastenError:
    """Return the error of a message."""
    try:
        error = msgspec.json.decode(text, type=_ErrorMessage)
    except msgspec.MsgspecError as problem:
        raise ProtocolError(f"an error message cannot be read: {problem}") from problem
    if error.retry_after_s is not None:
        return OverloadedError(error.message, retry_after_s=error.retry_after_s)
    return _ERROR_KINDS.get(error.kind, StageError)(error.message, hint=error.hint)


def shared_words(fd: int | None = None) -> tuple[int, memoryview]:
    """Return a file descriptor of shared 64-bit integers and a view of them; without one, of new integers."""
    if fd is None:
        fd = _anonymous_file()
        os.ftruncate(fd, mmap.PAGESIZE)
    if os.fstat(fd).st_size < mmap.PAGESIZE:
        raise ProtocolError("the region of counters is too small")
    return fd, memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("q")


def _anonymous_file() -> int:
    """Return a file in memory, or where there is none such, a temporary file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hasten", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
