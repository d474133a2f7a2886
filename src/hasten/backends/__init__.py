"""Define the contract of a backend. One module per runtime exposes `BACKEND`; the module's name is its registry key.

source ──make──▶ artifact (files) ──open──▶ session (one thread, ragged batches in, NumPy out)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from hasten.core.errors import PlanError, missing_package
from hasten.core.placement import OperatorPlacement, SelfTest
from hasten.core.plan import Shapes
from hasten.core.registry import Registry
from hasten.core.system.closing import Closing
from hasten.core.system.hardware import GPU_FAILURE_HINT, Gpu, Machine, usable_cores
from hasten.core.tensors import (
    BATCH,
    SEQUENCE,
    Batch,
    FloatArray,
    IntArray,
    Outputs,
    SessionSpec,
    Shape,
    Signature,
    TensorSpec,
    gather,
    tile_rows,
)
from hasten.core.variant import CUDA, Support, Variant

# Names of graphs: an encoder model has one graph; a generative model has a decoder and, if encoder-decoder, an encoder.
MODEL = "model"
ENCODER = "encoder"
DECODER = "decoder"
# With a memory limit, a session may pad rows to a multiple of this many tokens.
LIMITED_BUCKET_TOKENS = 16


class Dialect(StrEnum):
    """The form of a model that a backend makes its variants from."""

    MODULE = "module"  # a PyTorch module
    ONNX = "onnx"  # the portable graph
    ORT = "ort"  # the graph with ONNX Runtime's fused operators
    ORT_CUDA = "ort-cuda"  # the same for GPUs, where a norm is fused with the addition before it


@dataclass(frozen=True, slots=True)
class Source:
    """The input of `make`: graphs or a module, in the backend's dialect; graphs are also in the variant's precision."""

    signature: Signature
    graphs: Mapping[str, Path]
    module: object | None = None
    # Tensors of the graphs whose values exceed the range of fp16: operators that write or read them stay in fp32.
    fp16_overflow_tensors: frozenset[str] = frozenset()
    # Expected batch shapes, for runtimes that are tuned to them, and the workspace memory they may use.
    shapes: Shapes = field(default_factory=Shapes)
    workspace_bytes: int | None = None
    # For backends that quantize a module themselves: rows to calibrate on, and the matmuls to leave unquantized.
    calibration: Batch | None = None
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Artifact:
    """A variant on disk; `directory` contains everything it needs."""

    variant: Variant
    signature: Signature
    directory: Path
    graphs: Mapping[str, str]

    def path(self, graph: str = MODEL) -> Path:
        """Return the file of a graph."""
        return self.directory / self.graphs[graph]

    @property
    def size_bytes(self) -> int:
        """Return the total size of all files."""
        return sum(file.stat().st_size for file in self.directory.rglob("*") if file.is_file())


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a session; without `threads` it uses all usable cores."""

    threads: int | None = None
    # The resident memory in bytes that the process may reach; for sessions on CPUs.
    max_memory: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and (not isinstance(self.threads, int) or self.threads < 1):
            raise PlanError(f"threads is {self.threads!r}; it must be at least 1")
        if self.max_memory is not None and (not isinstance(self.max_memory, int) or self.max_memory < 1):
            raise PlanError(f"max_memory is {self.max_memory!r}; it must be at least 1 byte")

    @property
    def thread_count(self) -> int:
        """Return the number of threads to use."""
        return self.threads or usable_cores()


class Session(Closing):
    """A loaded variant. Not thread-safe: one thread owns a session. It may be closed more than once."""

    spec: SessionSpec

    def run(self, batch: Batch) -> Outputs:
        """Return the outputs of a ragged batch, without padding. They are copies that the caller may keep."""
        raise NotImplementedError

    def release_memory(self, *, everything: bool = False) -> None:
        """Return the memory that is retained for later batches to the system. The default retains none.

        With `everything`, also release what takes as long to rebuild as loading does: kernels compiled for a shape.
        """

    def warm(self, shapes: Sequence[Shape]) -> None:
        """Run a batch of each shape, so that later batches of these shapes start without setup."""
        for shape in shapes:
            self.run(uniform_batch(shape, self.spec.signature))


class PaddedSession(Session):
    """The base of sessions that run padded batches.

    If padding would change a model's outputs, only rows of equal length run together.
    """

    def run(self, batch: Batch) -> Outputs:
        signature = self.spec.signature
        if signature.ignores_padding or len(lengths := np.unique(batch.lengths)) <= 1:
            return self.run_padded(batch)
        groups = [np.flatnonzero(batch.lengths == length) for length in lengths]
        return gather([(rows, self.run_padded(batch.take(rows))) for rows in groups], batch, signature)

    def run_padded(self, batch: Batch) -> Outputs:
        """Pad all rows to one length and run them together."""
        raise NotImplementedError


@runtime_checkable
class Backend(Protocol):
    """A runtime that makes variants of a model and runs them."""

    @property
    def name(self) -> str:
        """Return the registry key."""

    @property
    def requires(self) -> tuple[str, ...]:
        """Return the packages that the backend imports; errors about a missing one name the pip command."""

    @property
    def extra(self) -> str | None:
        """Return the extra of hasten that installs these packages, or None if the base does."""

    @property
    def dialect(self) -> Dialect:
        """Return the form of the model that variants are made from."""

    @property
    def is_stored(self) -> bool:
        """Return whether a bundle may contain variants of this backend. PyTorch's are for comparison only."""

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        """Return whether this machine runs the backend, or a variant of it, and if not, why."""

    def variants(self, machine: Machine) -> Sequence[Variant]:
        """Return the variants that are tried if the user names none."""

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        """Write the files of a variant to `directory`."""

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        """Load a variant."""


@runtime_checkable
class ReportsPlacement(Protocol):
    """An optional capability of backends whose runtime reports where operators ran; used by `hasten inspect`."""

    def placements(self, artifact: Artifact) -> Sequence[OperatorPlacement]:
        """Load the variant and return its operators after optimization, with the provider or device of each."""


@runtime_checkable
class SupportsSelfTest(Protocol):
    """An optional capability of backends that can be tested without a model; used by `hasten doctor`."""

    def trials(self, machine: Machine) -> Sequence[SelfTest]:
        """Run a few operators on each device, provider or precision that the backend offers on this machine."""


@runtime_checkable
class FindsNonFinite(Protocol):
    """An optional capability of backends that can name the operator that causes non-finite outputs."""

    def first_non_finite(self, artifact: Artifact, batch: Batch) -> str | None:
        """Return the first operator with non-finite values on this batch that propagate to an output."""


@runtime_checkable
class SupportsBuckets(Protocol):
    """An optional capability of sessions whose cost per batch is its token count, rounded up to a prepared bucket."""

    @property
    def max_batch_tokens(self) -> int:
        """Return the number of tokens above which the session splits a batch."""

    def rounded(self, tokens: int) -> int:
        """Return the size of the bucket that holds this number of tokens."""

    def samples(self, tokens: int, rows: int) -> Sequence[Batch]:
        """Return one batch per bucket, up to this number of tokens and rows, the most frequent buckets first."""


@runtime_checkable
class PreparesBuckets(SupportsBuckets, Protocol):
    """An optional capability of sessions with buckets: a batch can run in a larger bucket than its own."""

    # Whether batches run in the smallest prepared bucket that holds them, rather than prepare their own.
    uses_larger_buckets: bool

    def prepare(self, batch: Batch) -> None:
        """Prepare the bucket of a batch, unless it is prepared."""

    def covering_samples(self, tokens: int, rows: int) -> Sequence[Batch]:
        """Return batches of few buckets that hold every batch up to this number of tokens and rows."""


@runtime_checkable
class SupportsPipelining(Protocol):
    """An optional capability of sessions that overlap batches: the host prepares and reads some while others compute.

    Their `run` takes batches of any size.
    """

    def run_many(self, batches: Iterable[Batch]) -> Generator[Outputs, None, None]:
        """Yield the outputs of each batch, in order; later batches are taken before earlier ones have finished.

        No other batch may run before the generator is exhausted or closed.
        """


def run_until(session: Session, batches: Sequence[Batch], until: float) -> int:
    """Run batches to warm up their buckets until the deadline (of `time.monotonic`), and return how many were run."""
    for done, batch in enumerate(batches):
        if time.monotonic() > until:
            return done
        session.run(batch)
    return len(batches)


@runtime_checkable
class SupportsTuning(Protocol):
    """An optional capability of backends that choose kernels by measuring; used by `hasten bench`."""

    def tune(self, artifact: Artifact) -> None:
        """Measure on this machine, unless the cache has results, and store the results in the cache."""


@runtime_checkable
class ChecksModule(Protocol):
    """An optional capability of backends that support some architectures only."""

    def check_module(self, module: object) -> None:
        """Reject an unsupported module, with the reason, before the build does expensive work."""


@runtime_checkable
class SupportsQuantization(Protocol):
    """An optional capability of backends that quantize a module themselves, matmul by matmul."""

    def most_sensitive(self, source: Source, variant: Variant) -> Sequence[str]:
        """Return the matmuls of a variant, the most sensitive to quantization first (candidates for `Source.keep`)."""


class Decoder(Protocol):
    """A loaded generative variant: a session with a slot per running sequence, which holds its KV cache.

    Not thread-safe: one thread owns a decoder. Sequences of any length join and leave between decode steps.
    """

    @property
    def slots(self) -> int:
        """Return the number of sequences that can run at once."""

    @property
    def cache_bytes(self) -> int:
        """Return the memory that the KV cache has committed; zero once the session is closed."""

    def max_cache_bytes(self, prompt_tokens: int) -> int:
        """Return the size of the KV cache when all slots have reached the end of the context; zero once closed.

        An encoder reads prompts of at most `prompt_tokens` tokens.
        """

    def prefill(self, slot: int, ids: IntArray) -> FloatArray:
        """Prefill an empty slot with a prompt and return the logits (vocabulary,) of the next token.

        An encoder-decoder model encodes the prompt and prefills the decoder's start tokens.
        """

    def decode(self, slots: Sequence[int], ids: IntArray) -> FloatArray:
        """Append one token to each slot and return the logits (slots, vocabulary) of the next tokens."""

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots as if all copies happened at once, for beams that continue from another beam."""

    def free(self, slot: int) -> None:
        """Release a slot for another sequence."""

    def close(self) -> None:
        """Release the runtime's memory. May be called more than once."""


@runtime_checkable
class SupportsChunkedPrefill(Protocol):
    """An optional capability of decoders: a prompt is prefilled in chunks, between decode steps of other slots."""

    def reserve(self, tokens: int) -> None:
        """Make room for a sequence of this length, so that no chunk of it has to move the KV cache of all slots."""

    def extend(self, slot: int, ids: IntArray) -> FloatArray:
        """Append several tokens to a prefilled slot and return the logits (vocabulary,) of the next token."""


@runtime_checkable
class SupportsDecoding(Protocol):
    """An optional capability of backends that run generative models."""

    def open_decoder(self, artifact: Artifact, options: RunOptions, slots: int) -> Decoder:
        """Load a generative variant that runs up to `slots` sequences at once."""


BACKENDS: Registry[Backend] = Registry("backend", "hasten.backends", "BACKEND")


def dialect_of(variant: Variant) -> Dialect:
    """Return the form of the model that a variant is made from."""
    dialect = BACKENDS.get(variant.backend).dialect
    return Dialect.ORT_CUDA if dialect is Dialect.ORT and variant.device == CUDA else dialect


def probe_packages(backend: Backend) -> Support:
    """Return whether the packages of a backend are installed, and if not, the pip command."""
    for package in backend.requires:
        if find_spec(package) is None:
            missing = missing_package(package, f"backend '{backend.name}'", backend.extra)
            return Support.no(f"the package '{package}' is not installed", missing.hint or "")
    return Support.yes()


def probe_gpu(machine: Machine) -> Support:
    """Return whether the machine has an NVIDIA GPU."""
    if machine.gpu_failure:
        return Support.no(f"the CUDA driver fails: {machine.gpu_failure}", GPU_FAILURE_HINT)
    return Support.yes() if machine.gpus else Support.no("there is no NVIDIA GPU here")


def probe_capability(gpu: Gpu, minimum: tuple[int, int], subject: str = "") -> Support:
    """Return whether a GPU has the compute capability that the subject, for example a precision, needs."""
    if tuple(map(int, gpu.capability.split("."))) >= minimum:
        return Support.yes()
    needed = ".".join(map(str, minimum))
    return Support.no(f"{subject} needs compute capability {needed}; {gpu.name} has {gpu.capability}".lstrip())


def probe_on_gpu(machine: Machine, variant: Variant | None, installed: Callable[[], Support]) -> Support:
    """Probe a backend that runs on GPUs only.

    On a machine with a GPU, a missing package is reported before a wrong device in the variant's name.
    """
    device_support = Support.yes()
    if variant is not None and variant.device != CUDA:
        device_support = Support.no(f"it runs on '{CUDA}', not on '{variant.device}'")
    if not machine.gpus:
        return probe_gpu(machine) if device_support.ok else device_support
    support = installed()
    return device_support if support.ok else support


def uniform_batch(shape: Shape, signature: Signature) -> Batch:
    """Return a batch of rows of equal length with arbitrary values, for warm-up."""
    length = min(shape.sequence, signature.max_length)
    values = {spec.name: np.array([spec.name == "input_ids"], np.int32) for spec in signature.inputs}
    return tile_rows(Batch(values, np.ones(1, np.int32)), np.full(shape.batch, length), signature.mask_id)


def to_dims(spec: TensorSpec, shape: Shape) -> tuple[int, ...]:
    """Return the dimensions of an input or output in a batch of this shape."""
    sizes = {BATCH: shape.batch, SEQUENCE: shape.sequence}
    return tuple(size if isinstance(size, int) else sizes[size] for size in spec.shape)
