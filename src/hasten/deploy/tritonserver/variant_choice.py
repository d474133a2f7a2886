"""Choose the variant that a model repository runs."""

from __future__ import annotations

import logging

from hasten.backends import Artifact
from hasten.bundle import Bundle
from hasten.bundle.read import GRAPH_BACKEND
from hasten.core.errors import UnsupportedError
from hasten.core.variant import CPU, CUDA, Precision, Variant
from hasten.deploy.tritonserver_options import Options, Runtime

logger = logging.getLogger("hasten")

TENSORRT = "tensorrt"
FUSED = "fused"
# The backends of hasten whose variants each runtime can run.
_RUNS = {
    Runtime.NATIVE: ("onnxruntime", "graph", TENSORRT),
    Runtime.PYTHON: ("onnxruntime", "graph", "openvino", FUSED),
}


def choose_variant(bundle: Bundle, options: Options) -> Artifact:
    """Return the requested variant or the fastest that the runtime can run; if there is none, the graph.

    The graph can be requested, too: it is plain ONNX, which older versions of ONNX Runtime compute correctly.
    """
    graph = bundle.graph()
    if options.variant in (GRAPH_BACKEND, graph.variant.name):
        return _check_graph(graph, options)
    if options.variant is not None:
        entry = bundle.entry(options.variant)
        reason = _incompatibility(entry.variant, options)
        if reason is not None:
            variants = bundle.manifest.variants
            others = [other.name for other in variants if _incompatibility(other.variant, options) is None]
            hint = f"use one of {', '.join(others)}" if others else "leave --variant out to use the graph"
            raise UnsupportedError(f"{entry.name} cannot be deployed: {reason}", hint=hint)
        return bundle.artifact(entry)
    skipped: list[tuple[str, str]] = []
    chosen: Artifact | None = None
    for entry in bundle.manifest.variants:
        reason = _incompatibility(entry.variant, options)
        # ONNX Runtime fuses the graph itself on a GPU, where variants that were fused for CPUs are not tested.
        if reason is None and options.device == CUDA and entry.device != CUDA:
            reason = "it was built for CPUs"
        if reason is None:
            chosen = bundle.artifact(entry)
            break
        skipped.append((entry.name, reason))
    chosen = chosen or _check_graph(graph, options)
    for name, reason in skipped:
        logger.warning("skipping %s: %s; using %s instead", name, reason, chosen.variant.name)
    return chosen


def _check_graph(graph: Artifact, options: Options) -> Artifact:
    if (reason := _incompatibility(graph.variant, options)) is not None:
        is_python = options.runtime is Runtime.PYTHON
        hint = "use --runtime native, or build with --device cuda" if is_python else "use --device cpu"
        raise UnsupportedError(f"the bundle's graph cannot be deployed: {reason}", hint=hint)
    return graph


def _incompatibility(variant: Variant, options: Options) -> str | None:
    backend, precision = variant.backend, variant.precision
    if variant.device == CUDA and options.device == CPU:
        return "it needs a GPU, and the device is cpu"
    if backend not in _RUNS[options.runtime]:
        other = next((runtime for runtime, backends in _RUNS.items() if backend in backends), None)
        alternative = f", but --runtime {other} does" if other is not None else ""
        return f"--runtime {options.runtime} does not run {backend}{alternative}"
    if variant.device == CUDA:
        return "--threads is not supported on GPUs" if options.threads is not None else None
    if options.device != CUDA:
        return None
    if options.runtime is Runtime.PYTHON:
        return "--runtime python runs CPU variants on the CPU"
    return f"its {precision} operators are for CPUs" if is_cpu_variant(variant) else None


def is_cpu_variant(variant: Variant) -> bool:
    """Return whether the variant runs on CPUs only, so that the server must not choose a GPU for it."""
    return variant.device == CPU and variant.precision in (Precision.INT8, Precision.INT4)
