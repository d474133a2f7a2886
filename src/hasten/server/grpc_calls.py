"""A call by gRPC: what it brings, the answer it waits for, and the line that the calls of a stream stand in."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from hasten.core.errors import DeadlineError, HastenError, InputError
from hasten.server.engine import Measured
from hasten.server.exchange import status_of
from hasten.server.inference import BYTES, VERSION, Output, Tensor, from_bytes, from_values, to_text
from hasten.server.messages import message
from hasten.server.watch import Seen, request_id

# What HTTP calls it to what gRPC calls it; what is not here is our own fault.
_CODES = {
    200: "OK",
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_GONE = 499
# Where numbers stand that do not come as bytes.
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
# Requests of one stream that are asked ahead of their answers.
_AHEAD = 64
# grpcio tells of a deadline that is not set as of one in the far future.
_NEVER_S = 1e9


class GoneError(HastenError):
    """Nobody waits for the answer any more."""


class Call:
    """One request, or one of a stream; it is given its answer by another thread, or its client leaves."""

    def __init__(self, what: str, context: Any) -> None:
        self.what = what
        self.context = context
        self.request: Any = None
        self.model = ""
        self.measured: Measured | None = None
        self.metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        # What takes the request back from whoever is to answer it.
        self.withdraw: Callable[[], None] = lambda: None
        self._id = request_id(self.metadata.get("x-request-id", ""))
        self._begin = time.monotonic()
        # With whether it is the last: some are given in pieces.
        self._answers: SimpleQueue[tuple[list[Output] | HastenError, bool]] = SimpleQueue()

    @property
    def left_s(self) -> float | None:
        """Until its deadline; None where it has none."""
        left: float = self.context.time_remaining()
        return left if left < _NEVER_S else None

    def read(self, kind: str, data: bytes) -> None:
        from google.protobuf.message import DecodeError

        try:
            self.request = message(kind).FromString(data)
        except DecodeError as error:
            raise InputError(f"the request is no {kind}") from error

    def give(self, answer: list[Output] | HastenError, measured: Measured | None = None) -> None:
        self.measured = measured
        self._answers.put((answer, True))

    def add(self, piece: list[Output]) -> None:
        """More follow."""
        self._answers.put((piece, False))

    def leave(self) -> None:
        self.withdraw()
        self._answers.put((GoneError("the client has left"), True))

    def wait(self) -> list[Output]:
        return next(outputs for outputs, is_last in self.pieces() if is_last)

    def pieces(self) -> Iterator[tuple[list[Output], bool]]:
        """As they come, the last one told apart."""
        is_last = False
        while not is_last:
            answer, is_last = self._answers.get()
            if isinstance(answer, HastenError):
                raise answer
            yield answer, is_last

    def seen(self, status: int) -> Seen:
        seconds = time.monotonic() - self._begin
        trace = self.metadata.get("traceparent", "")
        return Seen(self._id, self.what, self.model, status, seconds, self.measured, trace)


class Line:
    """The calls of a stream in the order they came. Where too many wait, whoever adds another waits too."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._calls: deque[Call] = deque()
        self._changed = threading.Condition()
        self._is_complete = self._has_left = False

    def add(self, call: Call) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_left or len(self._calls) < _AHEAD)
            self._calls.append(call)
            has_left = self._has_left
            self._changed.notify_all()
        if has_left:
            call.leave()

    def complete(self) -> None:
        """No more will come."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def leave(self) -> None:
        with self._changed:
            self._has_left = True
            calls = tuple(self._calls)
            self._changed.notify_all()
        for call in calls:
            call.leave()

    def __iter__(self) -> Iterator[Call]:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._calls or self._is_complete or self._has_left, self._idle_s):
                    raise DeadlineError(f"nothing was asked for {self._idle_s:g} s")
                if self._has_left or not self._calls:
                    return
                call = self._calls[0]
            # It stays in line while it is waited for, so that it is told when the client leaves.
            yield call
            with self._changed:
                self._calls.popleft()
                self._changed.notify_all()


def status_of_call(error: HastenError) -> int:
    return _GONE if isinstance(error, GoneError) else status_of(error)


def code_of(status: int) -> Any:
    import grpc

    return grpc.StatusCode[_CODES.get(status, "INTERNAL")]


def parameters_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    choices = {name: (value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}
    return {name: getattr(value, choice) for name, (value, choice) in choices.items() if choice}


def tensors_of(request: Any) -> Mapping[str, Tensor]:
    raw: Sequence[bytes] = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InputError(f"there are {len(request.inputs)} inputs, and the contents of {len(raw)}")
    tensors: dict[str, Tensor] = {}
    for place, given in enumerate(request.inputs):
        name, datatype, shape = given.name, given.datatype, list(given.shape)
        if name in tensors:
            raise InputError(f"input '{name}' is there twice")
        if raw:
            if given.HasField("contents"):
                raise InputError(f"input '{name}' has contents, and raw_input_contents too")
            tensors[name] = from_bytes(name, datatype, shape, memoryview(raw[place]))
            continue
        if datatype not in _CONTENTS:
            raise InputError(f"input '{name}' is {datatype}", hint="it comes in raw_input_contents, if at all")
        values: Sequence[Any] = getattr(given.contents, _CONTENTS[datatype])
        if datatype == BYTES:
            values = [to_text(name, value) for value in values]
        tensors[name] = from_values(name, datatype, shape, values)
    return tensors


def response_to(request: Any, outputs: Sequence[Output], **parameters: Any) -> Any:
    return message("ModelInferResponse")(
        model_name=request.model_name,
        model_version=VERSION,
        id=request.id,
        parameters=parameters,
        outputs=[{"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in outputs],
        raw_output_contents=[one.to_bytes() for one in outputs],
    )
