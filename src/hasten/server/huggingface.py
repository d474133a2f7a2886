"""Hugging Face's inference API: `POST /predict {"inputs": …, "parameters": …}`, answered as its pipelines answer."""

from __future__ import annotations

from typing import Any

import msgspec

from hasten.core.generation import Sampling
from hasten.core.tensors import Outputs
from hasten.generation.chat import is_chat
from hasten.generation.generator import full_text, ways_of
from hasten.server.events import Texts, whole
from hasten.server.exchange import Response
from hasten.server.routes import Call, Route, answering
from hasten.server.served import Served
from hasten.server.served_writer import ServedWriter
from hasten.tasks import Encoded

# What transformers and its servers call what we have another name for.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "num_beams": "beams",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}


class PredictRequest(msgspec.Struct):
    # A text, a list of texts, or what else the task takes: {"question": …, "context": …}.
    inputs: Any
    parameters: dict[str, Any] = {}
    model: str = ""


def predict(call: Call) -> None:
    request = call.exchange.read_json(PredictRequest)
    model = call.any(call.names.get("model", request.model))
    if isinstance(model, ServedWriter):
        write(call, model, request)
    else:
        answer(call, answering(model), request)


def answer(call: Call, served: Served, request: PredictRequest) -> None:
    asked = request.parameters
    options = served.task.options(served.spec, asked) if asked else served.usual_options

    def decode(outputs: Outputs, encoded: Encoded) -> Response:
        answers = served.task.decode(outputs, encoded, options)
        return Response.json(served.task.present(request.inputs, answers, options))

    call.exchange.on_close = served.ask(lambda: request.inputs, decode, call.done, options=options)


def write(call: Call, served: ServedWriter, request: PredictRequest) -> None:
    """`[{"generated_text": …}]` for one prompt, of many a list of such."""
    given = request.inputs
    is_many = isinstance(given, list) and not is_chat(given)
    prompts = given if is_many else [given]
    asked = dict(request.parameters)
    is_full = asked.pop("return_full_text", None)
    count = asked.pop("num_return_sequences", None)
    ways = ways_of(_sampling(served, asked), 1 if count is None else count)
    if is_full is None:
        is_full = not served.generation.start_ids

    def present(texts: Texts) -> object:
        written = [text for text, _ in texts]
        answers = [
            [
                {"generated_text": full_text(prompt, text) if is_full else text}
                for text in written[place * len(ways) : (place + 1) * len(ways)]
            ]
            for place, prompt in enumerate(prompts)
        ]
        return answers if is_many else answers[0]

    collected = whole(call, present)
    call.exchange.on_close = served.write(prompts, ways, collected.on_piece, collected.on_done)


def _sampling(served: ServedWriter, asked: dict[str, Any]) -> Sampling:
    """transformers' names, and its way to say that tokens are drawn."""
    draws = asked.pop("do_sample", None)
    given = {_OTHER_NAMES.get(name, name): value for name, value in asked.items()}
    if draws is False:
        given |= {"temperature": 0.0}
    elif draws and not served.generation.defaults.temperature:
        given.setdefault("temperature", 1.0)
    return served.sampling(given)


ROUTES = (
    Route("POST", "/predict", predict, "Answer as the task's pipeline answers", PredictRequest),
    Route("POST", "/models/{model}", predict, "The same, for one of several models", PredictRequest),
)
