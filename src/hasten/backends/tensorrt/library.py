"""Describe the libraries that build and run engines: TensorRT, and TensorRT for RTX, which has the same Python API."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from hasten.core.system.hardware import Gpu
from hasten.core.variant import Support


@dataclass(frozen=True, slots=True)
class Library:
    """A library with TensorRT's Python API."""

    name: str
    module: str
    # The backend, which is also the extra of hasten that installs the library.
    backend: str
    # Where its shared libraries come from.
    installation: str
    # Precedes the version in records: an engine of one library does not run in the other.
    version_prefix: str = ""
    # Builders that time kernels keep their timings; those that compile kernels when an engine is loaded have none.
    has_timing_cache: bool = True
    # The compute capabilities that the runtime accepts, the last of them and all newer ones; None for no list.
    capabilities: tuple[tuple[int, int], ...] | None = None

    def load(self) -> Any:
        """Import the module."""
        return import_module(self.module)

    @property
    def version(self) -> str:
        """Return the version, as engine records have it."""
        return f"{self.version_prefix}{self.load().__version__}"

    def probe_gpu(self, gpu: Gpu) -> Support:
        """Return whether the runtime accepts a GPU."""
        capability = tuple(map(int, gpu.capability.split(".")))
        if self.capabilities is None or capability in self.capabilities or capability > self.capabilities[-1]:
            return Support.yes()
        *others, newest = (".".join(map(str, accepted)) for accepted in self.capabilities)
        accepted = f"{', '.join(others)}, {newest} and newer"
        reason = f"{self.name} runs on compute capability {accepted}; {gpu.name} has {gpu.capability}"
        return Support.no(reason, "use the backend fused, onnxruntime or tensorrt")


TENSORRT = Library("TensorRT", "tensorrt", "tensorrt", "they are not on PyPI")
# The capabilities are those that its runtime named when it rejected an H200 (benchmarks/gpu/tensorrt_rtx.py).
TENSORRT_RTX = Library(
    "TensorRT for RTX",
    "tensorrt_rtx_bindings",
    "tensorrt-rtx",
    "pip install 'hasten[tensorrt-rtx]'",
    version_prefix="RTX ",
    has_timing_cache=False,
    capabilities=((8, 0), (8, 6), (8, 9), (12, 0)),
)


@cache
def loading_error(library: Library) -> str | None:
    """Return why a library or CUDA does not load, or None: the `tensorrt` of PyPI comes without its libraries."""
    try:
        library.load()
        import_module("cuda.bindings.runtime")
    except Exception as error:  # importing a package may raise anything
        return str(error)
    return None
