"""Serve Hugging Face's inference API: `POST /predict {"inputs": …, "parameters": …}`, with the results of pipelines."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import msgspec

from hasten.core.generation_types import SamplingParams
from hasten.core.tensors import Outputs
from hasten.generation.chat import is_chat
from hasten.generation.generator import full_text, params_per_sequence
from hasten.server.http.exchange import Response
from hasten.server.models.generative_model import CompletedTexts, GenerativeModel
from hasten.server.models.registry import Model
from hasten.server.protocols.routes import HttpCall, Route, require_encoder
from hasten.server.protocols.sse import reply_with_texts
from hasten.tasks import Encoded

# Parameter names of transformers and its servers, and ours.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}


class PredictRequest(msgspec.Struct):
    """The body of `POST /predict`."""

    # A text, a list of texts, or another input of the task: {"question": …, "context": …}.
    inputs: Any
    parameters: dict[str, Any] = {}
    model: str = ""


def predict(call: HttpCall) -> None:
    """Reply with what the task's pipeline would return."""
    request = call.exchange.read_json(PredictRequest)
    _answer(call.any_model(call.names.get("model", request.model)), call, request)


@singledispatch
def _answer(model: Model, call: HttpCall, request: PredictRequest) -> None:
    encoder, parameters = require_encoder(model), request.parameters
    if isinstance(request.inputs, list):
        encoder.check_items(len(request.inputs))
    # These may hold anything: checked before the request is queued.
    encoder.check_lists([request.inputs, parameters])
    task = encoder.task
    options = task.options(encoder.spec, parameters) if parameters else encoder.default_options

    def decode(outputs: Outputs, encoded: Encoded) -> Response:
        answers = task.decode(outputs, encoded, options)
        return Response.json(task.present(request.inputs, answers, options))

    call.exchange.on_close = encoder.submit_payload(lambda: request.inputs, decode, call.done, options=options)


@_answer.register(GenerativeModel)
def _generate(model: GenerativeModel, call: HttpCall, request: PredictRequest) -> None:
    """Reply with `[{"generated_text": …}]` for one prompt, and with a list of such lists for several."""
    inputs = request.inputs
    is_batch = isinstance(inputs, list) and not is_chat(inputs)
    prompts = inputs if is_batch else [inputs]
    parameters = dict(request.parameters)
    returns_full_text = parameters.pop("return_full_text", None)
    count = parameters.pop("num_return_sequences", None)
    if isinstance(count, int):
        model.check_items(count)
    sampling = params_per_sequence(_sampling_params(model, parameters), 1 if count is None else count)
    if returns_full_text is None:
        returns_full_text = not model.generation.decoder_start_token_ids

    def present(texts: CompletedTexts) -> object:
        generated = [text for text, _ in texts]
        answers = [
            [
                {"generated_text": full_text(prompt, text) if returns_full_text else text}
                for text in generated[index * len(sampling) : (index + 1) * len(sampling)]
            ]
            for index, prompt in enumerate(prompts)
        ]
        return answers if is_batch else answers[0]

    reply_with_texts(call, model, prompts, sampling, present)


def _sampling_params(model: GenerativeModel, parameters: dict[str, Any]) -> SamplingParams:
    """Translate transformers' parameter names, and `do_sample`, which has no counterpart here."""
    do_sample = parameters.pop("do_sample", None)
    options = {_OTHER_NAMES.get(name, name): value for name, value in parameters.items()}
    if do_sample is False:
        options |= {"temperature": 0.0}
    elif do_sample and not model.generation.defaults.temperature:
        options.setdefault("temperature", 1.0)
    return model.sampling(options)


ROUTES = (
    Route("POST", "/predict", predict, "Run the task's pipeline", PredictRequest),
    Route("POST", "/models/{model}", predict, "Run the pipeline of one of several models", PredictRequest),
)
