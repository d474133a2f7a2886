"""Texts to answers: the task's own code around the model, which it calls inside the server.

Rows of all requests that wait together are sorted by length, so that little of a batch is padding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hasten.core.batching import by_length
from hasten.core.errors import InputError, StageError
from hasten.core.tensors import ATTENTION_MASK, Batch, Outputs, divide, gather, pad, real_positions, repad, unpad
from hasten.deploy.tritonserver.models.request import Tensors, Told, answered, columns, server
from hasten.tasks import TASKS, Encoded, TaskSpec

OPTIONS = "OPTIONS"
# Fields that are lists, which come as JSON. A text that looks like one stays a text.
_LISTS = ("candidate_labels", "choices", "documents")


@dataclass(frozen=True, slots=True)
class _Asked:
    encoded: Encoded
    options: Any


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        told = Told.read(args)
        about, self._signature, self._tokenizer = told.about, told.signature, told.tokenizer
        self._spec = msgspec.convert(about["task"], TaskSpec)
        self._task = TASKS.get(self._spec.name)
        self._model: str = about["model"]
        # Of the model's inputs, those that its graph takes.
        self._inputs = frozenset(about["inputs"])
        self._fields: list[str] = about["fields"]
        self._max_rows: int = about["max_rows"]
        self._outputs: list[str] = about["outputs"]
        # Whether the answer is what the model gives, as it gives it.
        self._is_raw: bool = about["is_raw"]
        # What comes as [n] goes as [n], and [n, 1] as [n, 1].
        self._is_flat: bool = about["is_flat"]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return answered(requests, self._asked, self._answers)

    def _asked(self, request: Any) -> _Asked:
        given = columns(request, (*(name.upper() for name in self._fields), OPTIONS))
        said = set(given.pop(OPTIONS, ["{}"]))
        names = [name.lower() for name in given]
        items: list[Any] = [
            {name: _list_or_text(value) if name in _LISTS else value for name, value in zip(names, values, strict=True)}
            for values in zip(*given.values(), strict=True)
        ]
        if list(given) == ["TEXT"]:
            items = given["TEXT"]
        if len(said) > 1:
            raise InputError(f"{OPTIONS} differ within a request", hint="ask in several requests")
        options = self._task.options(self._spec, _options(said.pop()))
        return _Asked(self._task.encode(self._task.parse(items), self._tokenizer, options), options)

    def _answers(self, asked: list[_Asked]) -> Iterator[Tensors]:
        signature = self._signature
        whole = Batch.concatenate([one.encoded.batch for one in asked])
        # What sees padding runs with rows of its own length alone.
        groups = (
            by_length(whole.lengths, max_rows=self._max_rows)
            if signature.ignores_padding
            else [
                rows[start : start + self._max_rows]
                for length in np.unique(whole.lengths)
                for rows in [np.flatnonzero(whole.lengths == length)]
                for start in range(0, len(rows), self._max_rows)
            ]
        )
        outputs = gather([(rows, self._run(whole.take(rows))) for rows in groups], whole, signature)
        for one, own in zip(asked, divide(outputs, [one.encoded.batch for one in asked], signature), strict=True):
            answers = self._raw(own, one.encoded.batch) if self._is_raw else self._decoded(own, one)
            yield dict(zip(self._outputs, answers, strict=True))

    def _run(self, batch: Batch) -> Outputs:
        """The model in this server, asked without leaving it."""
        pb = server()
        request = pb.InferenceRequest(
            model_name=self._model,
            requested_output_names=[spec.name for spec in self._signature.outputs],
            inputs=[
                pb.Tensor(name, feed) for name, feed in pad(batch, self._signature).items() if name in self._inputs
            ],
            # What is decoded here is wanted here, wherever the model runs.
            preferred_memory=pb.PreferredMemory(pb.TRITONSERVER_MEMORY_CPU, 0),
        )
        response = request.exec()
        if response.has_error():
            raise StageError(f"{self._model} failed on a batch of {len(batch)}: {response.error().message()}")
        outputs = {
            spec.name: pb.get_output_tensor_by_name(response, spec.name).as_numpy() for spec in self._signature.outputs
        }
        return unpad(outputs, batch, self._signature)

    def _decoded(self, outputs: Outputs, one: _Asked) -> list[Any]:
        answers = self._task.decode(outputs, one.encoded, one.options)
        texts = [msgspec.json.encode(answer, enc_hook=lambda value: value.tolist()) for answer in answers]
        return [np.array(texts, object).reshape(-1 if self._is_flat else (-1, 1))]

    def _raw(self, outputs: Outputs, batch: Batch) -> list[Any]:
        """As rectangles; where there is one for tokens, the mask that tells them from padding comes last."""
        width, pads_left = int(batch.lengths.max()), self._signature.pads_left
        tensors: list[Any] = []
        for spec in self._signature.outputs:
            value = outputs[spec.name]
            tensors.append(repad(value, batch.lengths, width, pads_left) if spec.is_per_token else value)
        if any(spec.is_per_token for spec in self._signature.outputs):
            mask = real_positions(batch.lengths, width, pads_left)
            tensors += [mask.astype(spec.dtype.value) for spec in self._signature.inputs if spec.name == ATTENTION_MASK]
        return tensors


def _list_or_text(value: str) -> object:
    """Labels may also come as one text, with commas."""
    if value.startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value


def _options(text: str) -> Mapping[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f'{OPTIONS} is not a JSON object, as in {{"top_k": 3}}: {error}') from error
