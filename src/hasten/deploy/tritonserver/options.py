"""What is asked of a repository, and which of a bundle's variants can fulfil it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hasten.backends import Artifact
from hasten.bundle import Bundle
from hasten.bundle.read import GRAPH_BACKEND
from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.variant import CPU, CUDA, Precision, Variant
from hasten.deploy.tritonserver.pbtxt import Tensor

logger = logging.getLogger("hasten")

TENSORRT = "tensorrt"
FUSED = "fused"
DEVICES = (CPU, CUDA)
# Stricter than tritonserver: names are also parts of addresses, paths and file names of other tools.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class Runtime(StrEnum):
    """Who runs the model: the server's own backend for ONNX Runtime or TensorRT, or its Python backend."""

    NATIVE = "native"
    PYTHON = "python"


# The backends of hasten whose variants each of them runs.
_RUNS = {
    Runtime.NATIVE: ("onnxruntime", "graph", TENSORRT),
    Runtime.PYTHON: ("onnxruntime", "graph", "openvino", FUSED),
}


@dataclass(frozen=True, slots=True)
class Options:
    name: str = "transformer"
    runtime: Runtime = Runtime.NATIVE
    # The fastest that the runtime can run, where none is named.
    variant: str | None = None
    # Sessions beside each other, and threads of each; the cores are shared out.
    instances: int = 1
    threads: int | None = None
    # cpu or cuda; without one what the variant needs or, where it runs on both, what the server decides.
    device: str | None = None
    # Whether the server may answer again what it has answered; it must be started with a cache, too.
    cache: bool = False
    # How long a request waits for others; without it as the benchmark suggests.
    max_delay_us: int | None = None
    # The most texts that run together; without it the most that the bundle was built for.
    max_rows: int | None = None
    # Texts of shape [n], as transformer-deploy's clients send them, instead of [n, 1]: they are tokenized one request
    # at a time then, and run together where they are equally long.
    is_flat: bool = False
    # What the inference model calls its one output, where not by its own name.
    output: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise PlanError(
                f"'{self.name}' is no name for a model in tritonserver",
                hint="up to 100 letters, digits, '_', '-' and '.', a letter or a digit first",
            )
        for flag, value, least in (
            ("--instances", self.instances, 1),
            ("--threads", self.threads, 1),
            ("--max-delay-us", self.max_delay_us, 0),
            ("max_rows", self.max_rows, 1),
        ):
            if value is not None and value < least:
                raise PlanError(f"{flag} {value} is less than {least}")
        if self.device is not None and self.device not in DEVICES:
            raise PlanError(f"unknown device '{self.device}'", hint=f"known: {', '.join(DEVICES)}")


@dataclass(frozen=True, slots=True)
class Repository:
    """What was written: the models by name, and what the one that is asked takes and gives."""

    directory: Path
    runtime: Runtime
    variant: str
    model: str
    # None where the inference model tokenizes by itself.
    tokenize: str | None
    inference: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    # Whether they are the model's own tensors, or answers in JSON.
    is_raw: bool
    # The inputs of the model itself.
    tokens: tuple[str, ...]
    # The most rows of one request; 0 where tensors come without an axis of the batch.
    max_rows: int
    # The version of ONNX Runtime from which on the server's own answers right; empty where it is not asked.
    least_onnxruntime: str
    # What the server's Python must have beside NumPy.
    packages: tuple[str, ...]
    # What the model runs on, where that is not left to the server.
    device: str | None = None
    # The one kind of GPU, and version of TensorRT, that an engine runs on; empty where it is none.
    place: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        # A model that writes is asked itself.
        found = (self.model, self.tokenize, self.inference)
        return tuple(dict.fromkeys(name for name in found if name is not None))


def choose(bundle: Bundle, options: Options) -> Artifact:
    """The variant that was asked for or, in order of speed, the first that can run there; at last the graph.

    The graph can be asked for, too: it is plain ONNX, which older versions of ONNX Runtime answer rightly.
    """
    graph = bundle.graph()
    if options.variant in (GRAPH_BACKEND, graph.variant.name):
        return _required(graph, options)
    if options.variant is not None:
        entry = bundle.entry(options.variant)
        reason = _why_not(entry.variant, options)
        if reason is not None:
            others = [other.name for other in bundle.manifest.variants if _why_not(other.variant, options) is None]
            hint = f"of this bundle it runs {', '.join(others)}" if others else "without --variant it runs the graph"
            raise UnsupportedError(f"{entry.name} does not run there: {reason}", hint=hint)
        return bundle.artifact(entry)
    passed_over: list[tuple[str, str]] = []
    for entry in bundle.manifest.variants:
        reason = _why_not(entry.variant, options) or _untried(entry.variant, options)
        if reason is None:
            _tell(passed_over, entry.name)
            return bundle.artifact(entry)
        passed_over.append((entry.name, reason))
    graph = _required(graph, options)
    _tell(passed_over, graph.variant.name)
    return graph


def _tell(passed_over: Iterable[tuple[str, str]], chosen: str) -> None:
    for name, reason in passed_over:
        logger.warning("passing over %s: %s; using %s instead", name, reason, chosen)


def _required(graph: Artifact, options: Options) -> Artifact:
    if (reason := _why_not(graph.variant, options)) is not None:
        is_python = options.runtime is Runtime.PYTHON
        hint = "a bundle from `hasten build --device cuda` does; or --runtime native" if is_python else "--device cpu"
        raise UnsupportedError(f"the bundle's graph does not run there: {reason}", hint=hint)
    return graph


def _untried(variant: Variant, options: Options) -> str | None:
    """What was fused for processors was never tried on a GPU; there ONNX Runtime fuses the graph itself."""
    is_elsewhere = options.device == CUDA and variant.device != CUDA
    return "it was built for processors" if is_elsewhere else None


def _why_not(variant: Variant, options: Options) -> str | None:
    backend, precision = variant.backend, variant.precision
    if variant.device == CUDA and options.device == CPU:
        return "it runs on GPUs"
    if backend not in _RUNS[options.runtime]:
        other = next((one for one, runs in _RUNS.items() if backend in runs), None)
        also = f", with --runtime {other} it does" if other is not None else ""
        return f"--runtime {options.runtime} does not run {backend}{also}"
    if variant.device == CUDA:
        return "it has no threads to be given" if options.threads is not None else None
    if options.device != CUDA:
        return None
    if options.runtime is Runtime.PYTHON:
        return "--runtime python runs what was built for processors on the CPU"
    return f"its {precision} operators are for processors" if is_for_processors(variant) else None


def is_for_processors(variant: Variant) -> bool:
    """Whether it must not be left to a server, which takes a GPU where it has one."""
    return variant.device == CPU and variant.precision in (Precision.INT8, Precision.INT4)
