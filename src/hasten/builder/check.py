"""What was converted against what it came from: the graph on awkward shapes, the tokenizer on real text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np

from hasten.backends import Session
from hasten.core.errors import AccuracyError, StageError
from hasten.core.tensors import Batch, FloatArray, Signature, tiled
from hasten.core.tokenizer import Tokenizer
from hasten.measure.data import sample_texts
from hasten.measure.fault import is_finite
from hasten.measure.verify import FP32_TOLERANCE

_CHECKED_PAIRS = 40
_UNSOUND = "this architecture does not export soundly; please report it"


def check_graph(
    graph: Session,
    original: Session,
    rows: Batch,
    *,
    is_exact: bool = True,
    is_brief: bool = False,
    fault: Callable[[Batch], str | None] = lambda _: None,
) -> list[str]:
    """Raise on the first shape where the graph answers differently; returns what was checked.

    `fault` names the operator from which on numbers are not finite.

    Of one that is not exact, only that it answers: what dynamic int8 says depends on who else is in the batch. A brief
    check looks at one shape that is not the example's: what tracing froze shows there.
    """
    signature = graph.spec.signature
    notes = []
    for name, batch in islice(awkward_batches(rows, signature), 1 if is_brief else None):
        theirs = original.run(batch)
        try:
            ours = graph.run(batch)
        except StageError as error:
            raise StageError(f"the graph is wrong at {name}: it fails", hint=_UNSOUND) from error
        if not is_finite(ours):
            operator = fault(batch)
            first = f": first at {operator}" if operator is not None else ""
            raise AccuracyError(f"the graph is wrong at {name}: it gives numbers that are not finite{first}")
        for output in signature.outputs:
            where = f"{name}, output '{output.name}'"
            _compare(ours[output.name], theirs[output.name] if is_exact else ours[output.name], where)
        notes.append(name)
    if is_brief or not is_exact:
        return notes
    ragged = _ragged(rows, signature)
    together = graph.run(ragged)
    for output in signature.outputs:
        alone = [graph.run(ragged.take(np.array([row])))[output.name] for row in range(len(ragged))]
        where = f"batched against single, output '{output.name}'"
        _compare(together[output.name], np.concatenate(alone), where, hint="what a row answers depends on its padding")
    return [*notes, "batched against single"]


def awkward_batches(rows: Batch, signature: Signature) -> Iterator[tuple[str, Batch]]:
    """Batch 1 and 7, odd lengths, the maximum, length 1, and mixed lengths with padding."""
    longest = signature.max_length
    for count, length in ((1, 13), (7, 5), (1, longest), (2, longest - 1), (1, 1), (7, 1)):
        width = max(1, min(length, longest))
        yield f"{count}×{width}", tiled(rows, np.full(count, width), signature.mask_id)
    yield "mixed lengths", _ragged(rows, signature)


def _ragged(rows: Batch, signature: Signature) -> Batch:
    return tiled(rows, np.minimum([1, 9, 3, 30, 17, 2, 64], signature.max_length), signature.mask_id)


def _compare(ours: FloatArray, theirs: FloatArray, where: str, hint: str = _UNSOUND) -> None:
    if ours.shape != theirs.shape:
        raise StageError(f"the graph is wrong at {where}: shape {ours.shape} instead of {theirs.shape}")
    error = float(np.abs(ours - theirs).max(initial=0.0))
    # Not the other way round: what is no number is not larger than anything.
    if not error <= FP32_TOLERANCE * float(np.abs(theirs).max(initial=1.0)):
        raise StageError(f"the graph is wrong at {where}: it differs by {error:.2g}", hint=hint)


def check_tokenizer(ours: Tokenizer, theirs: Any) -> None:
    """The file in the bundle must give the very ids that transformers' tokenizer gives, for texts and for pairs."""
    texts = sample_texts()
    rows: list[str | tuple[str, str]] = [*texts, *pairwise(texts[:_CHECKED_PAIRS])]
    batch = ours.encode(rows).batch
    ends = np.cumsum(batch.lengths)
    for row, start, end in zip(rows, ends - batch.lengths, ends, strict=True):
        words = (row,) if isinstance(row, str) else row
        expected = theirs(*words, truncation="longest_first", max_length=ours.spec.max_length)
        for name in ours.spec.inputs:
            if batch.values[name][start:end].tolist() != list(expected[name]):
                raise StageError(f"the converted tokenizer gives other {name} than the original for {row!r:.80}")
