"""List the GPUs that CUDA offers in this environment by querying the driver in a subprocess.

nvidia-smi ignores CUDA_VISIBLE_DEVICES and orders devices differently, and a process that has initialized CUDA cannot
fork safely. Run as a script, this file queries the driver and prints JSON; it imports nothing else of hasten.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_CUDA_LIBRARY, _NVML_LIBRARY = "libcuda.so.1", "libnvidia-ml.so.1"
# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR in cuda.h.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_NAME_BYTES = 128
# Loading a driver for the first time takes seconds, longer with many GPUs.
_TIMEOUT_S = 60.0


def visible() -> list[dict[str, Any]]:
    """Return the name, memory_bytes, capability and driver of each GPU, in CUDA's order; none without a driver."""
    if _load_driver() is None:
        return []
    command = [sys.executable or "python3", "-I", "-S", __file__]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        devices: list[dict[str, Any]] = json.loads(process.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        # Without an answer from the driver no GPU can be used.
        return []
    return devices


def _load_driver() -> Any | None:
    """Load the driver from the directory that Triton is configured with, or else from the loader's path."""
    directory = os.environ.get("TRITON_LIBCUDA_PATH")
    return (_load(str(Path(directory, _CUDA_LIBRARY))) if directory else None) or _load(_CUDA_LIBRARY)


def _load(library: str) -> Any | None:
    try:
        return ctypes.CDLL(library)
    except OSError:
        return None


def _query_driver() -> list[dict[str, Any]]:
    cuda, count = _load_driver(), ctypes.c_int()
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    driver = _driver_version(cuda)
    return [_query_device(cuda, index) | {"driver": driver} for index in range(count.value)]


def _query_device(cuda: Any, index: int) -> dict[str, Any]:
    device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(_NAME_BYTES)
    major, minor = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, _NAME_BYTES, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    return {
        "name": name.value.decode(errors="replace"),
        "memory_bytes": size.value,
        "capability": f"{major.value}.{minor.value}",
    }


def _driver_version(cuda: Any) -> str:
    """Return the driver version from NVML, or else the CUDA version that the driver supports."""
    text, nvml = ctypes.create_string_buffer(_NAME_BYTES), _load(_NVML_LIBRARY)
    if nvml is not None:
        failed = nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, _NAME_BYTES)
        if not failed:
            return text.value.decode(errors="replace")
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    return f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"


if __name__ == "__main__":
    print(json.dumps(_query_driver()))
