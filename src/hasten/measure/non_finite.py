"""Find the operator at which the outputs of a variant become NaN or infinite, for the reason of its rejection."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hasten.backends import BACKENDS, Artifact, FindsNonFinite, RunOptions
from hasten.core.batching import batch_by_length
from hasten.core.errors import StageError
from hasten.core.report import Verdict
from hasten.core.tensors import Batch, Outputs

NOT_FINITE = "some outputs are not finite numbers"


def is_finite(outputs: Outputs) -> bool:
    """Return whether all outputs are finite numbers."""
    return all(bool(np.isfinite(values).all()) for values in outputs.values())


def with_non_finite_hint(verdict: Verdict, artifact: Artifact, rows: Batch, options: RunOptions) -> Verdict:
    """Return the verdict; if outputs are not finite, its reason names the operator."""
    if verdict.agreement.is_finite:
        return verdict
    operator = find_non_finite(artifact, rows, options)
    return replace(verdict, reason=f"{NOT_FINITE}: first at {operator}" if operator is not None else NOT_FINITE)


def find_non_finite(artifact: Artifact, rows: Batch, options: RunOptions) -> str | None:
    """Return the first operator whose values are not finite, or None if all are or the backend cannot tell."""
    backend = BACKENDS.get(artifact.variant.backend)
    if not isinstance(backend, FindsNonFinite):
        return None
    with backend.open(artifact, options) as session:
        groups = (rows.take(indices) for indices in batch_by_length(rows.lengths))
        group = next((group for group in groups if not is_finite(session.run(group))), None)
        if group is None:
            return None
        # One row is enough, unless the others contribute: in dynamic int8 and with padding rows affect each other.
        single_rows = (group.take(np.array([index])) for index in range(len(group)))
        batch = next((row for row in single_rows if not is_finite(session.run(row))), group)
    try:
        return backend.first_non_finite(artifact, batch)
    except (StageError, ImportError):  # The variant stays rejected, without the name of the operator.
        return None
