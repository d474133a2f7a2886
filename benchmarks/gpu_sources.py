"""The sources that results on a GPU depend on, and their digests. Uses the standard library alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Encoders …
ENCODER_SOURCES = (
    "src/hasten/kernels/**/*.py",
    "src/hasten/backends/fused/*.py",
    "src/hasten/backends/inductor.py",
    "src/hasten/backends/onnxruntime/cuda.py",
    "src/hasten/core/gpu/*.py",
)
# … and text generation.
SOURCES = (*ENCODER_SOURCES, "src/hasten/backends/onnxruntime/cuda_*.py")
# By default the GPU tests run these files.
TESTS = (
    "tests/kernels/test_*.py",
    "tests/contract/backends/test_backends.py",
    "tests/contract/backends/test_decoder_cuda.py",
)


# It compiles for GPUs that are not present, and runs everywhere.
_WITHOUT_GPU = ("tests/kernels/test_compile.py",)


def digests(*patterns: str) -> dict[str, str]:
    """Return the digest of each file that matches, by default of all sources."""
    files = sorted(file for pattern in patterns or SOURCES for file in ROOT.glob(pattern))
    named = {str(file.relative_to(ROOT)): file for file in files}
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for name, file in named.items()
        if name not in _WITHOUT_GPU
    }


def changed(recorded: Mapping[str, str], *patterns: str) -> list[str]:
    """Return the files that have changed, are new or are gone since digests were recorded; ignore other files."""
    current = digests(*patterns)
    names = {*current, *(name for name in recorded if not (ROOT / name).exists())}
    return sorted(name for name in names if recorded.get(name) != current.get(name))
