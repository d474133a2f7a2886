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
# CUDA_ERROR_STUB_LIBRARY and CUDA_ERROR_NO_DEVICE: there is no GPU, and nothing is broken.
_NO_GPU = (34, 100)
# Loading a driver for the first time takes seconds, longer with many GPUs.
_TIMEOUT_S = 60.0


def visible() -> tuple[list[dict[str, Any]], str]:
    """Return the name, memory_bytes, capability and driver of each GPU, in CUDA's order, and why the driver fails.

    Without a driver or a GPU there are none, and no failure.
    """
    if _load_driver() is None:
        return [], ""
    command = [sys.executable or "python3", "-I", "-S", __file__]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        devices, failure = json.loads(process.stdout)
    except subprocess.TimeoutExpired:
        return [], f"it does not answer within {_TIMEOUT_S:.0f} s"
    except subprocess.CalledProcessError as error:
        return [], f"it ends its process with status {error.returncode}"
    except (OSError, ValueError) as error:
        return [], f"it cannot be queried: {error}"
    return devices, failure


def _load_driver() -> Any | None:
    """Load the driver from the directory that Triton is configured with, or else from the loader's path."""
    directory = os.environ.get("TRITON_LIBCUDA_PATH")
    return (_load(str(Path(directory, _CUDA_LIBRARY))) if directory else None) or _load(_CUDA_LIBRARY)


def _load(library: str) -> Any | None:
    try:
        return ctypes.CDLL(library)
    except OSError:
        return None


def _query_driver() -> tuple[list[dict[str, Any]], str]:
    cuda, count = _load_driver(), ctypes.c_int()
    if cuda is None:
        return [], ""
    for call, status in (("cuInit", cuda.cuInit(0)), ("cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(count)))):
        if status:
            return [], "" if status in _NO_GPU else f"{call} returns {_error_name(cuda, status)}"
    driver = _driver_version(cuda)
    return [_query_device(cuda, index) | {"driver": driver} for index in range(count.value)], ""


def _error_name(cuda: Any, status: int) -> str:
    name = ctypes.c_char_p()
    is_known = hasattr(cuda, "cuGetErrorName") and cuda.cuGetErrorName(status, ctypes.byref(name)) == 0
    return f"{name.value.decode()} ({status})" if is_known and name.value else f"error {status}"


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
