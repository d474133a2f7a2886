"""Compare the exported graph with the model on awkward shapes, and the saved tokenizer with the model's on texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np

from hasten.backends import Session
from hasten.core.errors import AccuracyError, StageError
from hasten.core.tensors import Batch, FloatArray, Outputs, Signature, tile_rows
from hasten.core.text.tokenizer import Tokenizer
from hasten.measure.data import sample_texts
from hasten.measure.encoder_gate import FP32_TOLERANCE
from hasten.measure.non_finite import is_finite

_CHECKED_PAIRS = 40
_EXPORT_HINT = "this architecture is not exported correctly; please report it"
# Longer texts are not compared: eager attention needs memory for the square of the length, and 2 × 8191 took minutes.
_MAX_CHECKED_LENGTH = 2048


@dataclass(frozen=True, slots=True)
class CheckedBatch:
    """An awkward batch and the outputs of the reference for it."""

    name: str
    rows: Batch
    expected: Outputs


def answer_awkward_batches(reference: Session, rows: Batch) -> list[CheckedBatch]:
    """Run the reference on the batches that graphs are checked with."""
    batches = awkward_batches(rows, reference.spec.signature)
    return [CheckedBatch(name, batch, reference.run(batch)) for name, batch in batches]


def check_graph(
    graph: Session,
    batches: Sequence[CheckedBatch],
    *,
    is_exact: bool = True,
    is_brief: bool = False,
    find_non_finite: Callable[[Batch], str | None] = lambda _: None,
) -> list[str]:
    """Raise on the first shape at which the outputs of the graph differ; return the shapes that were checked.

    `find_non_finite` returns the first operator whose output is not finite. A graph that is not exact must only run:
    outputs of dynamic int8 depend on the rest of the batch. A brief check uses one shape, another than that of the
    tracing example, at which dimensions that tracing made constant show.
    """
    signature = graph.spec.signature
    notes = []
    for checked in islice(batches, 1 if is_brief else None):
        name, batch, expected = checked.name, checked.rows, checked.expected
        try:
            outputs = graph.run(batch)
        except StageError as error:
            raise StageError(f"the graph is wrong at {name}: it fails", hint=_EXPORT_HINT) from error
        if not is_finite(outputs):
            operator = find_non_finite(batch)
            first = f": first at {operator}" if operator is not None else ""
            raise AccuracyError(f"the graph is wrong at {name}: its outputs are not finite{first}")
        for output in signature.outputs:
            where = f"{name}, output '{output.name}'"
            _compare(outputs[output.name], (expected if is_exact else outputs)[output.name], where)
        notes.append(name)
    if is_brief or not is_exact:
        return notes
    ragged = batches[-1].rows
    together = graph.run(ragged)
    for output in signature.outputs:
        alone = [graph.run(ragged.take(np.array([row])))[output.name] for row in range(len(ragged))]
        where = f"batched against single, output '{output.name}'"
        _compare(together[output.name], np.concatenate(alone), where, hint="the outputs of a row depend on its padding")
    return [*notes, "batched against single"]


def awkward_batches(rows: Batch, signature: Signature) -> Iterator[tuple[str, Batch]]:
    """Yield batches of 1 and 7 rows with odd lengths, the maximum, length 1, and mixed lengths with padding."""
    max_length = min(signature.max_length, _MAX_CHECKED_LENGTH)
    for count, length in ((1, 13), (7, 5), (1, max_length), (2, max_length - 1), (1, 1), (7, 1)):
        width = max(1, min(length, max_length))
        yield f"{count}×{width}", tile_rows(rows, np.full(count, width), signature.mask_id)
    yield "mixed lengths", _ragged(rows, signature)


def _ragged(rows: Batch, signature: Signature) -> Batch:
    return tile_rows(rows, np.minimum([1, 9, 3, 30, 17, 2, 64], signature.max_length), signature.mask_id)


def _compare(outputs: FloatArray, expected: FloatArray, where: str, hint: str = _EXPORT_HINT) -> None:
    if outputs.shape != expected.shape:
        raise StageError(f"the graph is wrong at {where}: shape {outputs.shape} instead of {expected.shape}")
    error = float(np.abs(outputs - expected).max(initial=0.0))
    # Negated because every comparison with NaN is false.
    if not error <= FP32_TOLERANCE * float(np.abs(expected).max(initial=1.0)):
        raise StageError(f"the graph is wrong at {where}: it differs by {error:.2g}", hint=hint)


def check_tokenizer(tokenizer: Tokenizer, reference: Any) -> None:
    """Raise unless the bundle's tokenizer returns the ids of transformers' tokenizer, for texts and for pairs."""
    texts = sample_texts()
    rows: list[str | tuple[str, str]] = [*texts, *pairwise(texts[:_CHECKED_PAIRS])]
    batch = tokenizer.encode(rows).batch
    ends = np.cumsum(batch.lengths)
    for row, start, end in zip(rows, ends - batch.lengths, ends, strict=True):
        words = (row,) if isinstance(row, str) else row
        expected = reference(*words, truncation="longest_first", max_length=tokenizer.spec.max_length)
        for name in tokenizer.spec.inputs:
            if batch.values[name][start:end].tolist() != list(expected[name]):
                raise StageError(f"the converted tokenizer returns other {name} than transformers' for {row!r:.80}")
