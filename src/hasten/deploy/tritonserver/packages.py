"""The packages that the server's Python needs in addition to NumPy."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hasten.bundle import Bundle
from hasten.core.variant import CPU, CUDA
from hasten.deploy.tritonserver.variant_choice import FUSED

_TRITON = "triton"
# A plain version: a bundle is not trusted, and versions become parts of commands.
_VERSION = re.compile(r"[0-9][0-9A-Za-z.]*", re.ASCII)
# The packages that hasten's sessions import, by backend and device. ONNX Runtime for GPUs is installed with the CUDA
# libraries that it was built for, since the image may have others.
RUNTIME_PACKAGES = {
    ("onnxruntime", CPU): ("onnxruntime",),
    ("graph", CPU): ("onnxruntime",),
    ("openvino", CPU): ("openvino",),
    ("onnxruntime", CUDA): ("onnxruntime-gpu[cuda,cudnn]",),
    (FUSED, CUDA): ("msgspec", "safetensors", "torch", _TRITON),
}


def needs_compiler(packages: Sequence[str]) -> bool:
    """Return whether one of the packages compiles C code at run time, as Triton does."""
    return any(package.partition("==")[0] == _TRITON for package in packages)


def pin_versions(bundle: Bundle, names: Sequence[str]) -> tuple[str, ...]:
    """Pin packages to the versions that the bundle was built with, if it records them, without local build tags."""
    libraries = bundle.manifest.machine.libraries
    versions = {name: libraries.get(name.partition("[")[0], "").partition("+")[0] for name in names}
    return tuple(f"{name}=={version}" if _VERSION.fullmatch(version) else name for name, version in versions.items())
