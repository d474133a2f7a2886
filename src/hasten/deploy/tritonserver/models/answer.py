"""Answer texts with the task's own code, which calls the model inside the server.

The rows of all waiting requests are sorted by length to minimize padding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hasten.core.batching import batch_by_length, batch_in_order
from hasten.core.errors import InputError, StageError
from hasten.core.tensors import ATTENTION_MASK, Batch, IntArray, Outputs, pad, real_positions, repad, unpad
from hasten.deploy.tritonserver.models.request import (
    ModelConfig,
    Tensors,
    answer_requests,
    parse_options,
    read_columns,
    run_together,
    server,
)
from hasten.tasks import TASKS, Encoded, TaskSpec

OPTIONS = "OPTIONS"
# Fields that are lists, encoded as JSON. In other fields, a text that looks like a list remains a text.
_LISTS = ("candidate_labels", "choices", "documents")


@dataclass(frozen=True, slots=True)
class _ParsedRequest:
    encoded: Encoded
    options: Any


class TritonPythonModel:
    """Answers texts."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the configuration and open the tokenizer."""
        config = ModelConfig.read(args)
        values, self._signature, self._tokenizer = config.values, config.signature, config.tokenizer
        self._spec = msgspec.convert(values["task"], TaskSpec)
        self._task = TASKS.get(self._spec.name)
        self._model: str = values["model"]
        # The inputs of the graph, which may be fewer than the model's.
        self._inputs = frozenset(values["inputs"])
        self._fields: list[str] = values["fields"]
        self._max_rows: int = values["max_rows"]
        self._outputs: list[str] = values["outputs"]
        # Whether the answers are the model's output tensors.
        self._is_raw: bool = values["is_raw"]
        # Whether requests and answers have the shape [n] instead of [n, 1].
        self._is_flat: bool = values["is_flat"]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer the texts of all requests."""
        return answer_requests(requests, self._parse, self._answers)

    def _parse(self, request: Any) -> _ParsedRequest:
        columns = read_columns(request, (*(name.upper() for name in self._fields), OPTIONS))
        option_texts = set(columns.pop(OPTIONS, ["{}"]))
        names = [name.lower() for name in columns]
        items: list[Any] = [
            {name: _list_or_text(value) if name in _LISTS else value for name, value in zip(names, values, strict=True)}
            for values in zip(*columns.values(), strict=True)
        ]
        if list(columns) == ["TEXT"]:
            items = columns["TEXT"]
        if len(option_texts) > 1:
            raise InputError(f"{OPTIONS} differ within a request", hint="send several requests")
        options = self._task.options(self._spec, parse_options(option_texts.pop(), OPTIONS, '{"top_k": 3}'))
        return _ParsedRequest(self._task.encode(self._task.parse(items), self._tokenizer, options), options)

    def _answers(self, requests: list[_ParsedRequest]) -> Iterator[Tensors]:
        batches = [request.encoded.batch for request in requests]
        outputs = run_together(batches, self._groups, self._run, self._signature)
        for request, results in zip(requests, outputs, strict=True):
            answers = self._raw(results, request.encoded.batch) if self._is_raw else self._decoded(results, request)
            yield dict(zip(self._outputs, answers, strict=True))

    def _groups(self, lengths: IntArray) -> Iterator[IntArray]:
        if self._signature.ignores_padding:
            yield from batch_by_length(lengths, max_rows=self._max_rows)
            return
        # A model whose outputs depend on padding runs rows of one length at a time.
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            yield from (rows[part] for part in batch_in_order(len(rows), self._max_rows))

    def _run(self, batch: Batch) -> Outputs:
        """Run the model in this server, without a network request."""
        pb = server()
        request = pb.InferenceRequest(
            model_name=self._model,
            requested_output_names=[spec.name for spec in self._signature.outputs],
            inputs=[
                pb.Tensor(name, feed) for name, feed in pad(batch, self._signature).items() if name in self._inputs
            ],
            # The outputs are decoded on the CPU, wherever the model runs.
            preferred_memory=pb.PreferredMemory(pb.TRITONSERVER_MEMORY_CPU, 0),
        )
        response = request.exec()
        if response.has_error():
            raise StageError(f"{self._model} failed on a batch of {len(batch)}: {response.error().message()}")
        outputs = {
            spec.name: pb.get_output_tensor_by_name(response, spec.name).as_numpy() for spec in self._signature.outputs
        }
        return unpad(outputs, batch, self._signature)

    def _decoded(self, outputs: Outputs, request: _ParsedRequest) -> list[Any]:
        answers = self._task.decode(outputs, request.encoded, request.options)
        texts = [msgspec.json.encode(answer, enc_hook=lambda value: value.tolist()) for answer in answers]
        return [np.array(texts, object).reshape(-1 if self._is_flat else (-1, 1))]

    def _raw(self, outputs: Outputs, batch: Batch) -> list[Any]:
        """Return the padded outputs, followed by the attention mask if one of them is per token."""
        width, pads_left = int(batch.lengths.max()), self._signature.pads_left
        tensors: list[Any] = [
            repad(outputs[spec.name], batch.lengths, width, pads_left) if spec.is_per_token else outputs[spec.name]
            for spec in self._signature.outputs
        ]
        if any(spec.is_per_token for spec in self._signature.outputs):
            mask = real_positions(batch.lengths, width, pads_left)
            tensors += [mask.astype(spec.dtype.value) for spec in self._signature.inputs if spec.name == ATTENTION_MASK]
        return tensors


def _list_or_text(value: str) -> object:
    """Parse a JSON list; any other text is returned as it is, since labels may be separated by commas."""
    if value.startswith("["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value
