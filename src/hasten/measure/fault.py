"""Where a variant's numbers stop being numbers: the operator at fault, for the sentence that refuses it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hasten.backends import BACKENDS, Artifact, FindsNonFinite, RunOptions
from hasten.core.batching import by_length
from hasten.core.errors import StageError
from hasten.core.report import Verdict
from hasten.core.tensors import Batch, Outputs

NOT_FINITE = "some outputs are not finite numbers"


def is_finite(outputs: Outputs) -> bool:
    return all(bool(np.isfinite(values).all()) for values in outputs.values())


def with_fault(verdict: Verdict, artifact: Artifact, rows: Batch, options: RunOptions) -> Verdict:
    """The same verdict; where outputs are not finite, its reason names the operator."""
    if verdict.agreement.is_finite:
        return verdict
    return replace(verdict, reason=describe(artifact, rows, options))


def describe(artifact: Artifact, rows: Batch, options: RunOptions) -> str:
    operator = find_fault(artifact, rows, options)
    return f"{NOT_FINITE}: first at {operator}" if operator is not None else NOT_FINITE


def find_fault(artifact: Artifact, rows: Batch, options: RunOptions) -> str | None:
    """The first operator whose values are not finite; None where all are, or the backend cannot tell."""
    backend = BACKENDS.get(artifact.variant.backend)
    if not isinstance(backend, FindsNonFinite):
        return None
    with backend.open(artifact, options) as session:
        groups = (rows.take(places) for places in by_length(rows.lengths))
        group = next((group for group in groups if not is_finite(session.run(group))), None)
        if group is None:
            return None
        # One row is enough, unless it takes the others: dynamic int8 and padding make them neighbours.
        alone = (group.take(np.array([place])) for place in range(len(group)))
        batch = next((row for row in alone if not is_finite(session.run(row))), group)
    try:
        return backend.first_non_finite(artifact, batch)
    except (StageError, ImportError):  # What is refused stays refused, its operator unnamed.
        return None
