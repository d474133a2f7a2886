"""Hugging Face's inference API: `POST /predict {"inputs": …, "parameters": …}`, answered as its pipelines answer."""

from __future__ import annotations

from typing import Any

import msgspec

from hasten.core.tensors import Outputs
from hasten.server.exchange import Response
from hasten.server.routes import Call, Route
from hasten.tasks import Encoded


class PredictRequest(msgspec.Struct):
    # A text, a list of texts, or what else the task takes: {"question": …, "context": …}.
    inputs: Any
    parameters: dict[str, Any] = {}
    model: str = ""


def predict(call: Call) -> None:
    request = call.exchange.read_json(PredictRequest)
    served = call.only(call.names.get("model", request.model))
    asked = request.parameters
    options = served.task.options(served.spec, asked) if asked else served.usual_options

    def decode(outputs: Outputs, encoded: Encoded) -> Response:
        answers = served.task.decode(outputs, encoded, options)
        return Response.json(served.task.present(request.inputs, answers, options))

    call.exchange.on_close = served.ask(lambda: request.inputs, decode, call.done, options=options)


ROUTES = (
    Route("POST", "/predict", predict, "Answer as the task's pipeline answers", PredictRequest),
    Route("POST", "/models/{model}", predict, "The same, for one of several models", PredictRequest),
)
