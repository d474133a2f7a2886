"""A fake CUDA driver library, compiled on the fly, with the functions that list GPUs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CUDA = """
#include <stdlib.h>
#include <string.h>
static const char *names[] = {NAMES};
int cuInit(unsigned flags) { if (getenv("CRASHES")) abort(); return getenv("FAILS") ? atoi(getenv("FAILS")) : flags; }
int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_UNKNOWN"; return error == 999 ? 0 : 1; }
int cuDeviceGetCount(int *count) { *count = sizeof names / sizeof *names; return 0; }
int cuDeviceGet(int *device, int index) { *device = 40 + index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, names[device - 40], size); return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = (size_t)(device + 40) << 30; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? MAJOR : device - 40; return 0; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
"""
MANAGEMENT = """
#include <string.h>
int nvmlInit_v2(void) { return FAILED; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) { strncpy(version, "580.1", size); return 0; }
"""


def driver(folder: Path, *names: str, major: int = 9) -> Path:
    """Compile a driver that shows these GPUs, and return its directory; the first has 80 GiB and capability 9.0."""
    source = CUDA.replace("NAMES", ", ".join(f'"{name}"' for name in names)).replace("MAJOR", str(major))
    return _compile(folder, "cuda", source)


def management(folder: Path, *, is_broken: bool = False) -> Path:
    """Compile a fake NVML, and return its directory."""
    return _compile(folder, "nvidia-ml", MANAGEMENT.replace("FAILED", str(int(is_broken))))


def _compile(folder: Path, name: str, source: str) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("the fake CUDA driver needs a C compiler")
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / f"lib{name}.so.1")]
    subprocess.run(command, input=source, text=True, check=True)
    return folder
