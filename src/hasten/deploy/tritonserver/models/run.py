"""Run the model itself in hasten's session, on the CPU or the first GPU, for all waiting requests at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hasten.backends import BACKENDS, Artifact, RunOptions, SupportsBuckets, run_until
from hasten.core.batching import batch_by_length
from hasten.core.errors import InputError
from hasten.core.system.hardware import usable_cores
from hasten.core.tensors import ATTENTION_MASK, Batch, IntArray, Layout, real_positions, repad
from hasten.core.variant import Variant
from hasten.deploy.tritonserver.models.request import ModelConfig, Tensors, answer_requests, run_together, server

VARIANT = "variant"
# On a GPU, every bucket has a CUDA graph, which is captured during warm-up: up to this size and within this time.
_TOKENS, _WARM_S = 8192, 20.0


@dataclass(frozen=True, slots=True)
class _RequestRows:
    """The rows of a request without padding, and their padded width."""

    batch: Batch
    width: int


class TritonPythonModel:
    """Runs a variant of the bundle."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the configuration, open the session and warm it up."""
        config = ModelConfig.read(args)
        values, self._signature = config.values, config.signature
        variant = Variant.parse(values["variant"])
        artifact = Artifact(variant, self._signature, config.folder / VARIANT, values["graphs"])
        threads = values["threads"] or max(1, usable_cores() // values["instances"])
        self._limits: Mapping[str, int] = values["limits"]
        self._session = BACKENDS.get(variant.backend).open(artifact, RunOptions(threads))
        if isinstance(self._session, SupportsBuckets):
            tokens = min(_TOKENS, self._session.max_batch_tokens)
            run_until(self._session, self._session.samples(tokens, values["max_rows"]), time.monotonic() + _WARM_S)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Run the rows of all requests."""
        return answer_requests(requests, self._parse, self._outputs)

    def finalize(self) -> None:
        """Close the session."""
        self._session.close()

    def _parse(self, request: Any) -> _RequestRows:
        inputs = {
            spec.name: server().get_input_tensor_by_name(request, spec.name).as_numpy()
            for spec in self._signature.inputs
        }
        rows, width = inputs["input_ids"].shape
        if any(value.shape != (rows, width) for value in inputs.values()):
            raise InputError("the inputs have different shapes")
        mask = inputs.pop(ATTENTION_MASK, np.ones((rows, width))) != 0
        lengths = mask.sum(axis=1).astype(np.int32)
        has_rows = lengths.size and lengths.all()
        if not has_rows or not np.array_equal(mask, real_positions(lengths, width, self._signature.pads_left)):
            raise InputError("attention_mask must be ones, then zeros, with at least one 1 in each row")
        if lengths.max() > self._signature.max_length:
            raise InputError(f"a row has {lengths.max()} tokens, but the maximum is {self._signature.max_length}")
        for name, value in inputs.items():
            # Runtimes read beyond the end of a table for other values.
            if value.min() < 0 or value.max() >= self._limits.get(name, np.inf):
                raise InputError(f"{name} must be from 0 to {self._limits[name] - 1}")
        tokens = {name: value[mask].astype(np.int32) for name, value in inputs.items()}
        return _RequestRows(Batch(tokens, lengths), width)

    def _outputs(self, requests: list[_RequestRows]) -> Iterator[Tensors]:
        signature = self._signature
        outputs = run_together([request.batch for request in requests], self._groups, self._session.run, signature)
        for request, results in zip(requests, outputs, strict=True):
            tensors: dict[str, Any] = {}
            for spec in signature.outputs:
                value = results[spec.name]
                if spec.is_per_token:
                    value = repad(value, request.batch.lengths, request.width, signature.pads_left)
                tensors[spec.name] = value.astype(spec.dtype.value, copy=False)
            yield tensors

    def _groups(self, lengths: IntArray) -> list[IntArray]:
        # A session with a packed layout takes all rows and splits them itself.
        is_packed = self._session.spec.layout is Layout.PACKED
        return [np.arange(len(lengths))] if is_packed else batch_by_length(lengths)
