"""Which GPUs there are, as CUDA's driver tells it: here by one of our own, which is the little of it that is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.core.hardware import Gpu, this_machine

CUDA = """
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { if (getenv("CRASHES")) abort(); return flags || getenv("FAILS") ? 999 : 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int place) { *device = 40 + place; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, device == 40 ? "A" : "B", size); return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = (size_t)device << 30; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? 9 : device == 41; return 0; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
"""
MANAGEMENT = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) { strncpy(version, "580.1", size); return 0; }
"""
TELL = "from hasten.core.hardware import this_machine; print(this_machine().gpus)"


def compiled(folder: Path, **libraries: str) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    for name, source in libraries.items():
        file = folder / f"lib{name}.so.1"
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(file)]
        subprocess.run(command, input=source, text=True, check=True)
    return folder


def told(folder: Path, **variables: str) -> str:
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)} | variables
    asked = subprocess.run([sys.executable, "-c", TELL], env=environment, capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def test_gpus_are_those_that_the_driver_shows_in_its_order(tmp_path: Path) -> None:
    folder = compiled(tmp_path, cuda=CUDA, **{"nvidia-ml": MANAGEMENT})
    gpus = Gpu("A", 40 << 30, "9.0", "580.1"), Gpu("B", 41 << 30, "9.1", "580.1")
    assert told(folder) == str(gpus)


def test_without_the_management_library_the_driver_is_the_cuda_it_is_for(tmp_path: Path) -> None:
    broken = MANAGEMENT.replace("return 0; }", "return 9; }", 1)
    assert "'CUDA 13.2'" in told(compiled(tmp_path, cuda=CUDA, **{"nvidia-ml": broken}))


@pytest.mark.parametrize("how", ["FAILS", "CRASHES"])
def test_a_driver_that_does_not_work_has_no_gpus_and_takes_nobody_with_it(how: str, tmp_path: Path) -> None:
    assert told(compiled(tmp_path, cuda=CUDA), **{how: "1"}) == "()"


def test_what_pytorch_sees_is_what_we_see() -> None:
    torch = pytest.importorskip("torch")
    seen = [torch.cuda.get_device_properties(place) for place in range(torch.cuda.device_count())]
    expected = [(gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}") for gpu in seen]
    found = [(gpu.name, gpu.capability) for gpu in this_machine().gpus]
    assert found == [(name, capability) for name, _, capability in expected]
    for gpu, (_, size, _) in zip(this_machine().gpus, expected, strict=True):
        assert gpu.memory_bytes == pytest.approx(size, rel=0.02)
