"""What the v2 protocol means where a model writes: tensors as tritonserver's own writing models take and give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hasten.core.errors import HastenError, InputError
from hasten.core.generation import Sampling
from hasten.generation.options import NAMES
from hasten.generation.rows import Piece
from hasten.server.engine import Measured
from hasten.server.events import Texts, Whole
from hasten.server.inference import BYTES, VERSION, Described, Inference, Metadata, Output, Tensor, order
from hasten.server.inference import describe as describe_answering
from hasten.server.inference import infer as infer_answering
from hasten.server.models import Model
from hasten.server.routes import answering
from hasten.server.served_writer import ServedWriter

TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
_STREAM, _EXCLUDES, _SAMPLING = "stream", "exclude_input_in_output", "sampling_parameters"
_INPUTS = (TEXT_INPUT, _STREAM, _EXCLUDES, _SAMPLING)
# What the models that tritonserver writes with call what we have another name for.
_OTHER_NAMES = {"max_new_tokens": "max_tokens", "stop_words": "stop", "random_seed": "seed", "beam_width": "beams"}

OnDone = Callable[[list[Output] | HastenError, Measured | None], None]
OnPiece = Callable[[list[Output]], None]


def describe(model: Model) -> Metadata:
    if not isinstance(model, ServedWriter):
        return describe_answering(answering(model))
    inputs, outputs = [Described(TEXT_INPUT, BYTES, [-1])], [Described(TEXT_OUTPUT, BYTES, [-1])]
    return Metadata(model.name, [VERSION], f"hasten_{model.variant}", inputs, outputs)


def infer(model: Model, inference: Inference, on_done: OnDone, on_piece: OnPiece | None = None) -> Callable[[], None]:
    """As of a model that answers; pieces, where one is asked for as a stream and somebody takes them."""
    if not isinstance(model, ServedWriter):
        return infer_answering(answering(model), inference, on_done)
    for name in inference.outputs:
        if name != TEXT_OUTPUT:
            raise InputError(f"the model has no output '{name}'", hint=f"it gives {TEXT_OUTPUT}")
    texts = _texts(inference.tensors)
    sampling = sampling_from(model, _asked(inference))
    _, timeout_s = order(inference.parameters)
    if on_piece is not None and _flag(inference.tensors, _STREAM, default=False):
        if len(texts) != 1:
            raise InputError(f"a stream is one text, and {TEXT_INPUT} has {len(texts)}")
        return _stream(model, texts[0], sampling, timeout_s, on_done, on_piece)
    is_excluded = _flag(inference.tensors, _EXCLUDES, default=True)

    def done(outcome: Texts | HastenError, measured: Measured | None) -> None:
        if isinstance(outcome, HastenError):
            on_done(outcome, measured)
            return
        written = [text if is_excluded else before + text for before, (text, _) in zip(texts, outcome, strict=True)]
        on_done([_output(*written)], measured)

    collected = Whole(done)
    return model.write(texts, [sampling], collected.on_piece, collected.on_done, timeout_s=timeout_s)


def sampling_from(served: ServedWriter, given: Mapping[str, Any]) -> Sampling:
    return served.sampling({_OTHER_NAMES.get(name, name): value for name, value in given.items()})


def _stream(
    model: ServedWriter, text: str, sampling: Sampling, timeout_s: float | None, on_done: OnDone, on_piece: OnPiece
) -> Callable[[], None]:
    """The last piece is the answer: what a client looks for, to know that no more follow."""
    last = ""

    def told(_: int, piece: Piece) -> None:
        nonlocal last
        if piece.finish is not None:
            last = piece.text
        else:
            on_piece([_output(piece.text)])

    def done(outcome: object, measured: Measured | None) -> None:
        on_done(outcome if isinstance(outcome, HastenError) else [_output(last)], measured)

    return model.write([text], [sampling], told, done, is_stream=True, timeout_s=timeout_s)


def _output(*texts: str) -> Output:
    return Output(TEXT_OUTPUT, [text.encode() for text in texts])


def _texts(tensors: Mapping[str, Tensor]) -> list[str]:
    for name in tensors:
        if name not in _INPUTS:
            raise InputError(f"the model has no input '{name}'", hint=f"it takes {', '.join(_INPUTS)}")
    given = tensors.get(TEXT_INPUT)
    if given is None or given.dtype != object:
        raise InputError(f"input '{TEXT_INPUT}' is missing" if given is None else f"input '{TEXT_INPUT}' must be BYTES")
    return list(given.reshape(-1).tolist())


def _asked(inference: Inference) -> dict[str, Any]:
    """Options come as parameters of the request, or as JSON in a tensor of their own."""
    known = (*NAMES, *_OTHER_NAMES)
    asked = {name: value for name, value in inference.parameters.items() if name in known}
    if (given := inference.tensors.get(_SAMPLING)) is None:
        return asked
    wrong = InputError(f"input '{_SAMPLING}' must be one JSON object")
    if given.dtype != object or given.size != 1:
        raise wrong
    try:
        found = msgspec.json.decode(given.reshape(-1)[0], type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise wrong from error
    return asked | found


def _flag(tensors: Mapping[str, Tensor], name: str, *, default: bool) -> bool:
    given = tensors.get(name)
    if given is None:
        return default
    if given.dtype != bool or given.size != 1:
        raise InputError(f"input '{name}' must be one BOOL")
    return bool(given.reshape(-1)[0])
