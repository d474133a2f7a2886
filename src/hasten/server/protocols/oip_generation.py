"""Open Inference Protocol v2 for text generation: the tensors that tritonserver's own generative models use.

Importing this module registers generative models with `oip.describe` and `oip.infer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hasten.core.errors import HastenError, InputError
from hasten.core.generation_types import SamplingParams
from hasten.generation.options import NAMES
from hasten.generation.sequences import TextDelta
from hasten.server.models.generative_model import CompletedTexts, GenerativeModel
from hasten.server.protocols import oip
from hasten.server.protocols.oip import Inference, Metadata, OnDone, OnTextDelta, Output, Tensor
from hasten.server.request_records import RequestStats

TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
STREAM, EXCLUDES, _SAMPLING = "stream", "exclude_input_in_output", "sampling_parameters"
_INPUTS = (TEXT_INPUT, STREAM, EXCLUDES, _SAMPLING)
# Parameter names of tritonserver's generative models, and ours.
_OTHER_NAMES = {"max_new_tokens": "max_tokens", "stop_words": "stop", "random_seed": "seed", "beam_width": "num_beams"}


@oip.describe.register(GenerativeModel)
def _describe(model: GenerativeModel) -> Metadata:
    return oip.metadata_of(model, [oip.texts(TEXT_INPUT)], [oip.texts(TEXT_OUTPUT)])


@oip.infer.register(GenerativeModel)
def _infer(
    model: GenerativeModel, inference: Inference, on_done: OnDone, on_text_delta: OnTextDelta | None = None
) -> Callable[[], None]:
    for name in inference.outputs:
        if name != TEXT_OUTPUT:
            raise InputError(f"the model has no output '{name}'", hint=f"its output is {TEXT_OUTPUT}")
    texts = _texts(inference.tensors)
    sampling = sampling_from(model, _sampling_options(inference))
    _, timeout_s = oip.priority_and_timeout(inference.parameters)
    if on_text_delta is not None and _flag(inference.tensors, STREAM, default=False):
        if len(texts) != 1:
            raise InputError(f"a stream supports one text, but {TEXT_INPUT} has {len(texts)}")
        return _stream(model, texts[0], sampling, timeout_s, on_done, on_text_delta)
    excludes_prompt = _flag(inference.tensors, EXCLUDES, default=True)

    def done(outcome: CompletedTexts | HastenError, stats: RequestStats | None) -> None:
        if isinstance(outcome, HastenError):
            on_done(outcome, stats)
            return
        pairs = zip(texts, outcome, strict=True)
        on_done([_output(*(text if excludes_prompt else prompt + text for prompt, (text, _) in pairs))], stats)

    return model.generate(texts, [sampling], done, timeout_s)


def sampling_from(model: GenerativeModel, options: Mapping[str, Any]) -> SamplingParams:
    """Return the model's sampling parameters, changed by options in tritonserver's or our names."""
    return model.sampling({_OTHER_NAMES.get(name, name): value for name, value in options.items()})


def _stream(
    model: GenerativeModel,
    text: str,
    sampling: SamplingParams,
    timeout_s: float | None,
    on_done: OnDone,
    on_text_delta: OnTextDelta,
) -> Callable[[], None]:
    """Pass deltas on as they come. The last one is the response, by which a client knows that no more follow."""
    last = ""

    def on_delta(_: int, delta: TextDelta) -> None:
        nonlocal last
        if delta.finish is not None:
            last = delta.text
        else:
            on_text_delta([_output(delta.text)])

    def done(outcome: object, stats: RequestStats | None) -> None:
        on_done(outcome if isinstance(outcome, HastenError) else [_output(last)], stats)

    return model.submit([text], [sampling], on_delta, done, timeout_s=timeout_s)


def _output(*texts: str) -> Output:
    return Output(TEXT_OUTPUT, [text.encode() for text in texts])


def _texts(tensors: Mapping[str, Tensor]) -> list[str]:
    for name in tensors:
        if name not in _INPUTS:
            raise InputError(f"the model has no input '{name}'", hint=f"its inputs are {', '.join(_INPUTS)}")
    tensor = tensors.get(TEXT_INPUT)
    if tensor is None:
        raise InputError(f"input '{TEXT_INPUT}' is missing")
    if tensor.dtype != object:
        raise InputError(f"input '{TEXT_INPUT}' must be BYTES")
    return list(tensor.reshape(-1).tolist())


def _sampling_options(inference: Inference) -> dict[str, Any]:
    """Return the options given as parameters of the request and as JSON in a separate tensor."""
    known = (*NAMES, *_OTHER_NAMES)
    options = {name: value for name, value in inference.parameters.items() if name in known}
    if (tensor := inference.tensors.get(_SAMPLING)) is None:
        return options
    invalid = InputError(f"input '{_SAMPLING}' must be one JSON object")
    if tensor.dtype != object or tensor.size != 1:
        raise invalid
    try:
        return options | msgspec.json.decode(tensor.reshape(-1)[0], type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid from error


def _flag(tensors: Mapping[str, Tensor], name: str, *, default: bool) -> bool:
    tensor = tensors.get(name)
    if tensor is None:
        return default
    if tensor.dtype != bool or tensor.size != 1:
        raise InputError(f"input '{name}' must be one BOOL")
    return bool(tensor.reshape(-1)[0])
