"""What a backend is. One file per runtime exposes `BACKEND`; the file's name is its registry key.

source ──make──▶ artifact (files) ──open──▶ session (one thread, ragged batches in, NumPy out)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import numpy as np

from hasten.core.closing import Closing
from hasten.core.errors import PlanError, missing_package
from hasten.core.execution import Execution, Trial
from hasten.core.hardware import Machine, usable_cores
from hasten.core.plan import Shapes
from hasten.core.registry import Registry
from hasten.core.tensors import Batch, FloatArray, IntArray, Outputs, SessionSpec, Shape, Signature, gather, tiled
from hasten.core.variant import CUDA, Support, Variant

# The graph every encoder has; models that write have a decoder, and some an encoder that reads for it.
MODEL = "model"
ENCODER = "encoder"
DECODER = "decoder"


class Dialect(StrEnum):
    """The form of the model a backend is made from."""

    MODULE = "module"  # a PyTorch module
    ONNX = "onnx"  # the portable graph
    ORT = "ort"  # the graph with ONNX Runtime's own fused operators
    ORT_CUDA = "ort-cuda"  # the same for GPUs, where norms are one with the additions before them


@dataclass(frozen=True, slots=True)
class Source:
    """What a variant is made from, already in the backend's dialect and, where graphs carry it, precision."""

    signature: Signature
    graphs: Mapping[str, Path]
    module: object | None = None
    # Tensors of the graphs whose values leave the range of fp16: what computes or reads them stays in fp32.
    beyond_fp16: frozenset[str] = frozenset()
    # The sizes it will see, for runtimes that are tuned to them, and the memory they may work in.
    shapes: Shapes = field(default_factory=Shapes)
    workspace_bytes: int | None = None
    # For backends that quantize a module by themselves: rows to find ranges on, and the products to leave as they are.
    calibration: Batch | None = None
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Artifact:
    """A variant on disk: everything it needs lies in `directory`."""

    variant: Variant
    signature: Signature
    directory: Path
    graphs: Mapping[str, str]

    def path(self, graph: str = MODEL) -> Path:
        return self.directory / self.graphs[graph]

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.directory.rglob("*") if file.is_file())


@dataclass(frozen=True, slots=True)
class RunOptions:
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and (not isinstance(self.threads, int) or self.threads < 1):
            raise PlanError(f"threads is {self.threads!r}; it must be at least 1")

    @property
    def thread_count(self) -> int:
        return self.threads or usable_cores()


class Session(Protocol):
    """A loaded variant. Not thread-safe: one thread owns it."""

    spec: SessionSpec

    def run(self, batch: Batch) -> Outputs: ...

    def warm(self, shapes: Sequence[Shape]) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class Backend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def requires(self) -> tuple[str, ...]:
        """The packages it imports; a missing one is answered with the pip command."""
        ...

    @property
    def extra(self) -> str | None:
        """The extra of hasten that installs them, if it is not the base."""
        ...

    @property
    def dialect(self) -> Dialect: ...

    @property
    def is_stored(self) -> bool:
        """Whether a bundle may hold it. PyTorch's own variants are there for comparison."""
        ...

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        """Whether this backend, or this one variant of it, runs here."""
        ...

    def variants(self, machine: Machine) -> Sequence[Variant]:
        """What is tried when the user does not choose."""
        ...

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact: ...

    def open(self, artifact: Artifact, options: RunOptions) -> Session: ...


@runtime_checkable
class TellsExecutions(Protocol):
    """What a backend may offer beside the contract, where its runtime says what it executed: `hasten inspect`."""

    def executions(self, artifact: Artifact) -> Sequence[Execution]:
        """Load the variant and say which operators it consists of by then, and on what each runs."""
        ...


@runtime_checkable
class HasTrials(Protocol):
    """What a backend may offer beside the contract, to be looked at without a model: `hasten doctor`."""

    def trials(self, machine: Machine) -> Sequence[Trial]:
        """A few operators, run for real on each device, provider or precision it offers here."""
        ...


@runtime_checkable
class FindsNonFinite(Protocol):
    """What a backend may offer beside the contract, to say which operator is at fault where outputs are no numbers."""

    def first_non_finite(self, artifact: Artifact, batch: Batch) -> str | None:
        """The first operator whose values on this batch are not finite, of those that reach the outputs."""
        ...


@runtime_checkable
class HasSizes(Protocol):
    """What a session may offer beside the contract, where a batch costs its tokens, rounded up to a size made ready."""

    @property
    def most_tokens(self) -> int:
        """That it computes at once; of more it makes parts."""
        ...

    def rounded(self, tokens: int) -> int:
        """The size in which so many are computed."""
        ...

    def samples(self, tokens: int, rows: int) -> Sequence[Batch]:
        """A batch of each size that batches up to these may have, those that come most often first."""
        ...


def run_until(session: Session, batches: Sequence[Batch], until: float) -> int:
    """Make sizes ready, by the clock of time.monotonic; how many were run by then."""
    for done, batch in enumerate(batches):
        if time.monotonic() > until:
            return done
        session.run(batch)
    return len(batches)


@runtime_checkable
class Tunes(Protocol):
    """What a backend may offer beside the contract, where it chooses by measuring: `hasten bench` asks for it."""

    def tune(self, artifact: Artifact) -> None:
        """Measure on this machine, unless that was done, and keep what was found in the cache."""
        ...


@runtime_checkable
class KnowsModules(Protocol):
    """What a backend may offer beside the contract, where it is made from some architectures and no others."""

    def check_module(self, module: object) -> None:
        """Refuse one that nothing can be made from, with the reason, before much is done for it."""
        ...


@runtime_checkable
class Quantizes(Protocol):
    """What a backend may offer beside the contract, where it quantizes a module by itself, product by product."""

    def most_sensitive(self, source: Source, variant: Variant) -> Sequence[str]:
        """The products of a variant, the one that costs most accuracy first; some may be kept (`Source.keep`)."""
        ...


class Decoder(Protocol):
    """A loaded variant that writes: a session with a slot for each row in progress, which holds what was read so far.

    Not thread-safe: one thread owns it. Rows come and go between steps, each as long as it is.
    """

    @property
    def slots(self) -> int:
        """Rows that it can hold at once."""
        ...

    def begin(self, slot: int, ids: IntArray) -> FloatArray:
        """Read a prompt into an empty slot: the logits (vocabulary,) of the token after it.

        Where an encoder reads the prompt, what an answer begins with is read too.
        """
        ...

    def step(self, slots: Sequence[int], ids: IntArray) -> FloatArray:
        """One more token in each of these slots: the logits (rows, vocabulary) of the ones after them."""
        ...

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Each target becomes what its source was before any was copied: beams that go on from another's."""
        ...

    def end(self, slot: int) -> None:
        """The slot is empty again."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Decodes(Protocol):
    """What a backend may offer beside the contract, where it runs models that write."""

    def open_decoder(self, artifact: Artifact, options: RunOptions, slots: int) -> Decoder: ...


BACKENDS: Registry[Backend] = Registry("backend", "hasten.backends", "BACKEND")


def dialect_of(variant: Variant) -> Dialect:
    """The form of the model a variant is made from."""
    dialect = BACKENDS.get(variant.backend).dialect
    return Dialect.ORT_CUDA if dialect is Dialect.ORT and variant.device == CUDA else dialect


def probe_packages(backend: Backend) -> Support:
    """The first question of every probe: is the library there?"""
    for package in backend.requires:
        if find_spec(package) is None:
            missing = missing_package(package, f"backend '{backend.name}'", backend.extra)
            return Support.no(f"the package '{package}' is not installed", missing.hint or "")
    return Support.yes()


def probe_gpu(machine: Machine) -> Support:
    return Support.yes() if machine.gpus else Support.no("there is no NVIDIA GPU here")


def probe_on_gpu(machine: Machine, variant: Variant | None, installed: Callable[[], Support]) -> Support:
    """For a backend that has nothing to run on any other device.

    Where there is a GPU, what is not installed for it is told before another device that was named.
    """
    named = Support.yes()
    if variant is not None and variant.device != CUDA:
        named = Support.no(f"it runs on '{CUDA}', not on '{variant.device}'")
    if not machine.gpus:
        return probe_gpu(machine) if named.ok else named
    support = installed()
    return named if support.ok else support


class OpenSession(Closing):
    """The part that every session shares."""

    spec: SessionSpec

    def run(self, batch: Batch) -> Outputs:
        raise NotImplementedError

    def warm(self, shapes: Sequence[Shape]) -> None:
        for shape in shapes:
            self.run(uniform_batch(shape, self.spec.signature))


class PaddedSession(OpenSession):
    """The part that every session on rectangles shares."""

    def run(self, batch: Batch) -> Outputs:
        signature = self.spec.signature
        if signature.ignores_padding or len(lengths := np.unique(batch.lengths)) <= 1:
            return self.run_padded(batch)
        groups = [np.flatnonzero(batch.lengths == length) for length in lengths]
        return gather([(rows, self.run_padded(batch.take(rows))) for rows in groups], batch, signature)

    def run_padded(self, batch: Batch) -> Outputs:
        """All rows as one rectangle."""
        raise NotImplementedError


def uniform_batch(shape: Shape, signature: Signature) -> Batch:
    """Rows of one length whose values do not matter."""
    length = min(shape.sequence, signature.max_length)
    values = {spec.name: np.array([spec.name == "input_ids"], np.int32) for spec in signature.inputs}
    return tiled(Batch(values, np.ones(1, np.int32)), np.full(shape.batch, length), signature.mask_id)
