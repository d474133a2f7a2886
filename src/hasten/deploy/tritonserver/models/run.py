"""The model itself, run by hasten's own session, on a processor or the first GPU: all requests that wait in one go."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hasten.backends import BACKENDS, Artifact, HasSizes, RunOptions, run_until
from hasten.core.batching import by_length
from hasten.core.errors import InputError
from hasten.core.hardware import usable_cores
from hasten.core.tensors import ATTENTION_MASK, Batch, IntArray, Layout, divide, gather, real_positions, repad
from hasten.core.variant import Variant
from hasten.deploy.tritonserver.models.request import Tensors, Told, answered, server

VARIANT = "variant"
# On a GPU each size of a batch has a graph of its own, which is recorded before it is asked for: as far as time allows.
_TOKENS, _WARM_S = 8192, 20.0


@dataclass(frozen=True, slots=True)
class _Rows:
    """Of one request, without padding, and how wide they came."""

    batch: Batch
    width: int


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        told = Told.read(args)
        about, self._signature = told.about, told.signature
        variant = Variant.parse(about["variant"])
        artifact = Artifact(variant, self._signature, told.folder / VARIANT, about["graphs"])
        threads = about["threads"] or max(1, usable_cores() // about["instances"])
        self._limits: Mapping[str, int] = about["limits"]
        self._session = BACKENDS.get(variant.backend).open(artifact, RunOptions(threads))
        if isinstance(self._session, HasSizes):
            tokens = min(_TOKENS, self._session.most_tokens)
            run_until(self._session, self._session.samples(tokens, about["max_rows"]), time.monotonic() + _WARM_S)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return answered(requests, self._rows, self._outputs)

    def finalize(self) -> None:
        self._session.close()

    def _rows(self, request: Any) -> _Rows:
        given = {
            spec.name: server().get_input_tensor_by_name(request, spec.name).as_numpy()
            for spec in self._signature.inputs
        }
        rows, width = given["input_ids"].shape
        if any(value.shape != (rows, width) for value in given.values()):
            raise InputError("the inputs have different shapes")
        mask = given.pop(ATTENTION_MASK, np.ones((rows, width))) != 0
        lengths = mask.sum(axis=1).astype(np.int32)
        if (
            not lengths.size
            or not lengths.all()
            or not np.array_equal(mask, real_positions(lengths, width, self._signature.pads_left))
        ):
            raise InputError("attention_mask must be ones, then zeros, with at least one 1 in each row")
        if lengths.max() > self._signature.max_length:
            raise InputError(f"a row has {lengths.max()} tokens, and the model takes {self._signature.max_length}")
        for name, value in given.items():
            # Runtimes look up others beyond the end of a table.
            if value.min() < 0 or value.max() >= self._limits.get(name, np.inf):
                raise InputError(f"{name} are from 0 to {self._limits[name] - 1}")
        return _Rows(Batch({name: value[mask].astype(np.int32) for name, value in given.items()}, lengths), width)

    def _outputs(self, asked: list[_Rows]) -> Iterator[Tensors]:
        signature = self._signature
        whole = Batch.concatenate([rows.batch for rows in asked])
        groups = _groups(whole.lengths, self._session.spec.layout)
        parts = [(rows, self._session.run(whole.take(rows))) for rows in groups]
        outputs = gather(parts, whole, signature)
        for rows, own in zip(asked, divide(outputs, [rows.batch for rows in asked], signature), strict=True):
            tensors: dict[str, Any] = {}
            for spec in signature.outputs:
                value = own[spec.name]
                if spec.is_per_token:
                    value = repad(value, rows.batch.lengths, rows.width, signature.pads_left)
                tensors[spec.name] = value.astype(spec.dtype.value, copy=False)
            yield tensors


def _groups(lengths: IntArray, layout: Layout) -> list[IntArray]:
    """What pads nothing takes all rows as they are, and cuts them by itself."""
    return [np.arange(len(lengths))] if layout is Layout.PACKED else by_length(lengths)
