"""The GPUs that CUDA shows a process of this environment: asked of the driver itself, in a process of its own.

nvidia-smi lists others, in another order, where CUDA_VISIBLE_DEVICES or a container leaves some out or slices one; and
a process that has asked CUDA cannot fork any more. Run as a script this file is the asking: it imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_DRIVER, _MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"
# Of the driver's header: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
_MAJOR, _MINOR = 75, 76
_NAME_BYTES = 128
# A driver that is loaded for the first time takes seconds, with many GPUs longer.
_TIMEOUT_S = 60.0


def visible() -> list[dict[str, Any]]:
    """Of each its name, memory_bytes, capability and driver, in CUDA's order; none where there is no driver."""
    if _found() is None:
        return []
    command = [sys.executable or "python3", "-I", "-S", __file__]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        found: list[dict[str, Any]] = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        # A driver that does not answer has no GPU for anybody.
        return []
    return found


def _found() -> Any | None:
    """Where Triton was told that it lies, or where the loader finds it."""
    told = os.environ.get("TRITON_LIBCUDA_PATH")
    return (_opened(str(Path(told, _DRIVER))) if told else None) or _opened(_DRIVER)


def _opened(library: str) -> Any | None:
    try:
        return ctypes.CDLL(library)
    except OSError:
        return None


def _ask() -> list[dict[str, Any]]:
    cuda, count = _found(), ctypes.c_int()
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    driver = _driver_version(cuda)
    return [_about(cuda, place) | {"driver": driver} for place in range(count.value)]


def _about(cuda: Any, place: int) -> dict[str, Any]:
    device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(_NAME_BYTES)
    major, minor = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), place)
    cuda.cuDeviceGetName(name, _NAME_BYTES, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return {
        "name": name.value.decode(errors="replace"),
        "memory_bytes": size.value,
        "capability": f"{major.value}.{minor.value}",
    }


def _driver_version(cuda: Any) -> str:
    """As the management library says it; else the version of CUDA that it is for, which is what programs ask of it."""
    text, management = ctypes.create_string_buffer(_NAME_BYTES), _opened(_MANAGEMENT)
    if management is not None:
        failed = management.nvmlInit_v2() or management.nvmlSystemGetDriverVersion(text, _NAME_BYTES)
        if not failed:
            return text.value.decode(errors="replace")
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    return f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"


if __name__ == "__main__":
    print(json.dumps(_ask()))
