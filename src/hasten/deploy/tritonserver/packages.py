"""What the server's Python must have beside NumPy."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hasten.bundle import Bundle
from hasten.core.variant import CPU, CUDA, Variant
from hasten.deploy.tritonserver.options import FUSED

_TRITON = "triton"
# By backend and device, what a session of ours imports. ONNX Runtime for GPUs brings the libraries of CUDA that it was
# built for: those of the image may be others.
_NEEDED = {
    ("onnxruntime", CPU): ("onnxruntime",),
    ("graph", CPU): ("onnxruntime",),
    ("openvino", CPU): ("openvino",),
    ("onnxruntime", CUDA): ("onnxruntime-gpu[cuda,cudnn]",),
    (FUSED, CUDA): ("msgspec", "safetensors", "torch", _TRITON),
}


def needed(variant: Variant) -> tuple[str, ...]:
    return _NEEDED[variant.backend, variant.device]


def needs_compiler(packages: Sequence[str]) -> bool:
    return any(package.partition("==")[0] == _TRITON for package in packages)


def pinned(bundle: Bundle, names: Sequence[str]) -> tuple[str, ...]:
    """Packages of the versions that the bundle was built with, where it says so; a build's own mark is left out."""
    built = bundle.manifest.machine.libraries
    found = {name: built.get(name.partition("[")[0], "").partition("+")[0] for name in names}
    return tuple(f"{name}=={version}" if _is_version(version) else name for name, version in found.items())


def _is_version(text: str) -> bool:
    """A bundle may say anything, and what it says here becomes part of commands."""
    return re.fullmatch(r"[0-9][0-9A-Za-z.]*", text, re.ASCII) is not None
