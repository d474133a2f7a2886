"""Build a verified and benchmarked bundle from a model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hasten.builder.preflight import preflight
from hasten.builder.sources.directory import temporary_directory
from hasten.bundle import Bundle
from hasten.core.plan import Plan
from hasten.core.progress import Progress, SilentProgress

logger = logging.getLogger("hasten")


def build(
    plan: Plan,
    output: Path | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    directory: Path | None = None,
    qdq_module: Any = None,
    is_brief: bool = False,
) -> Bundle:
    """Build the bundle of a plan. Nothing appears at the target unless every stage succeeds.

    `directory` holds the files of a model whose name in the plan is not an address; `qdq_module` is the same model as a
    module with quantizers in it. `is_brief` times the optimal shape alone, which is enough to choose a variant.
    """
    qdq_precision = None
    if qdq_module is not None:
        from hasten.quantize.qdq.toggle import quantized_precision

        qdq_precision = quantized_precision(qdq_module)
    resolved = preflight(plan, output, force=force, directory=directory, qdq_precision=qdq_precision)
    for note in resolved.candidates.notes:
        logger.warning("%s", note)
    with temporary_directory() as work:
        may_replace = force or output is None
        pipeline = resolved.model.family.pipeline
        return pipeline(resolved, work, progress or SilentProgress(), may_replace, qdq_module, is_brief).run()
