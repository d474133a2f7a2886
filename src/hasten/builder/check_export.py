"""Compare the exported graph with the model on awkward shapes, and the saved tokenizer with the model's on texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np

from hasten.backends import Session
from hasten.core.errors import AccuracyError, StageError
from hasten.core.system.hardware import available_memory_bytes
from hasten.core.tensors import (
    EXPANSION_MASK,
    PROMPT_MASK,
    Batch,
    FloatArray,
    IntArray,
    Outputs,
    Signature,
    ranges_to_indices,
    tile_rows,
)
from hasten.core.text.tokenizer import Tokenizer
from hasten.measure.data import sample_texts
from hasten.measure.encoder_gate import FP32_TOLERANCE
from hasten.measure.non_finite import is_finite

_CHECKED_PAIRS = 40
_EXPORT_HINT = "this architecture is not exported correctly; please report it"
# Tokens at the end of a row to which no token attends. Where attention is local, a token far from all others would
# attend to nothing, of which runtimes make different numbers; queries are shorter than the windows of real models.
_MAX_FILLERS = 4
# Texts up to this length are always checked. Attention of longer ones may take minutes and gigabytes.
_ALWAYS_CHECKED_TOKENS = 2048
# For the reference; the graph takes about as long.
_LONG_TEXT_BUDGET_S = 60.0
# The peak memory of one pass over copies of one layer's attention scores: 7.2 GB for six heads and 8,192 tokens.
_SCORE_COPIES = 4
_MAX_MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class CheckedBatch:
    """An awkward batch and the outputs of the reference for it."""

    name: str
    rows: Batch
    expected: Outputs


@dataclass(frozen=True, slots=True)
class GraphChecks:
    """The batches that graphs are checked with, and why longer texts are not checked, if so."""

    batches: tuple[CheckedBatch, ...]
    # Rows of mixed lengths, which are also run one by one.
    ragged: Batch
    unchecked: str = ""


def answer_awkward_batches(
    reference: Session, rows: Batch, *, attention_heads: int = 1, long_text_budget_s: float = _LONG_TEXT_BUDGET_S
) -> GraphChecks:
    """Run the reference on the batches that graphs are checked with.

    One text of the maximum length is among them if its pass is expected to fit into `long_text_budget_s` and the
    memory, otherwise a shorter one.
    """
    signature = reference.spec.signature
    checked: list[CheckedBatch] = []

    def answer(name: str, batch: Batch) -> None:
        checked.append(CheckedBatch(name, batch, reference.run(batch)))

    for name, batch in awkward_batches(rows, signature):
        answer(name, batch)
    ragged, unchecked = checked[-1].rows, ""
    if signature.max_length > _ALWAYS_CHECKED_TOKENS:
        begin = time.perf_counter()
        answer(*_long_text(rows, signature, _ALWAYS_CHECKED_TOKENS))
        seconds = time.perf_counter() - begin
        length = _affordable_length(signature.max_length, seconds, long_text_budget_s, attention_heads)
        if length > _ALWAYS_CHECKED_TOKENS:
            answer(*_long_text(rows, signature, length))
        if length < signature.max_length:
            unchecked = (
                f"texts of more than {length} tokens are not checked: they would take too long or too much memory"
            )
    return GraphChecks(tuple(checked), ragged, unchecked)


def check_graph(
    graph: Session,
    checks: GraphChecks,
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
    shapes = []
    for checked in islice(checks.batches, 1 if is_brief else None):
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
        shapes.append(name)
    if is_brief or not is_exact:
        return shapes
    ragged = checks.ragged
    together = graph.run(ragged)
    for output in signature.outputs:
        alone = [graph.run(ragged.take(np.array([row])))[output.name] for row in range(len(ragged))]
        where = f"batched against single, output '{output.name}'"
        _compare(together[output.name], np.concatenate(alone), where, hint="the outputs of a row depend on its padding")
    return [*shapes, "batched against single"]


def awkward_batches(rows: Batch, signature: Signature) -> Iterator[tuple[str, Batch]]:
    """Yield batches of 1 and 7 rows with odd lengths, the maximum, length 1, and mixed lengths with padding.

    Of models for long texts, the longest rows are a quarter of those that are always checked alone.
    """
    max_length = signature.max_length
    longest = max_length if max_length <= _ALWAYS_CHECKED_TOKENS else _ALWAYS_CHECKED_TOKENS // 4
    for count, length in ((1, 13), (7, 5), (1, longest), (2, longest - 1), (1, 1), (7, 1)):
        width = max(1, min(length, max_length))
        yield f"{count}×{width}", _tiled(rows, np.full(count, width), signature)
    yield "mixed lengths", _ragged(rows, signature)


def _long_text(rows: Batch, signature: Signature, length: int) -> tuple[str, Batch]:
    return f"1×{length}", _tiled(rows, np.array([length]), signature)


def _ragged(rows: Batch, signature: Signature) -> Batch:
    return _tiled(rows, np.minimum([1, 9, 3, 30, 17, 2, 64], signature.max_length), signature)


def _tiled(rows: Batch, lengths: IntArray, signature: Signature) -> Batch:
    batch = tile_rows(rows, lengths, signature.mask_id)
    # The rows may have no prompt and no expansion: mark the first quarter of each, and a few tokens at its end.
    positions = ranges_to_indices(np.zeros_like(batch.lengths), batch.lengths)
    quarters, ends = (np.repeat(values, batch.lengths) for values in (batch.lengths // 4, batch.lengths))
    fillers = np.minimum(quarters, _MAX_FILLERS)
    marks = {PROMPT_MASK: positions < quarters, EXPANSION_MASK: positions >= ends - fillers}
    marked = {name: marks[name].astype(np.int32) for name in marks if name in batch.values}
    return Batch({**batch.values, **marked}, batch.lengths)


def _affordable_length(max_length: int, seconds: float, budget_s: float, heads: int) -> int:
    """Return the maximum length, or its largest half, quarter, … that fits into the budget and the memory.

    Time and memory grow with the square of the length; `seconds` is the time of a text that is always checked.
    """
    memory = available_memory_bytes()
    length = max_length
    while length > _ALWAYS_CHECKED_TOKENS:
        score_bytes = _SCORE_COPIES * heads * length**2 * np.dtype(np.float32).itemsize
        fits = memory is None or score_bytes <= _MAX_MEMORY_SHARE * memory
        if fits and seconds * (length / _ALWAYS_CHECKED_TOKENS) ** 2 <= budget_s:
            return length
        length //= 2
    return _ALWAYS_CHECKED_TOKENS


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
