"""GPUs are listed as the CUDA driver reports them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.core.system.hardware import Gpu, this_machine
from support.fakes.cuda_driver import driver, management

PROGRAM = """
import os
from hasten.core.system.hardware import this_machine
print(getattr(this_machine(), os.environ.get("FIELD", "gpus")))
"""

# Without the checks of packages and backends, which take seconds.
DOCTOR = """
from hasten.measure import doctor
doctor.check_package = lambda module: doctor.check_backend.__globals__["Checkup"]("left out")
doctor._broken = lambda pool, packages: []
for problem in doctor.diagnose().problems:
    print(problem.message, problem.hint)
"""


def list_gpus(folder: Path, **variables: str) -> str:
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": ""} | variables
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return process.stdout.strip()


def test_gpus_are_listed_in_the_order_of_the_driver(tmp_path: Path) -> None:
    driver(management(tmp_path), "A", "B")
    assert list_gpus(tmp_path) == str((Gpu("A", 80 << 30, "9.0", "580.1"), Gpu("B", 81 << 30, "9.1", "580.1")))


def test_driver_version_is_the_cuda_version_without_nvml(tmp_path: Path) -> None:
    driver(management(tmp_path, is_broken=True), "A")
    assert "'CUDA 13.2'" in list_gpus(tmp_path)


def test_driver_is_found_in_tritons_directory(tmp_path: Path) -> None:
    for name in "AB":
        (tmp_path / name).mkdir()
        driver(tmp_path / name, name)
    assert "name='B'" in list_gpus(tmp_path / "A", TRITON_LIBCUDA_PATH=str(tmp_path / "B"))
    assert "name='A'" in list_gpus(tmp_path / "A", TRITON_LIBCUDA_PATH=str(tmp_path / "C"))


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ({"FAILS": "999"}, "cuInit returns CUDA_ERROR_UNKNOWN (999)"),
        ({"FAILS": "803"}, "cuInit returns error 803"),
        ({"CRASHES": "1"}, "it ends its process with status -6"),
        # There is no device.
        ({"FAILS": "100"}, ""),
    ],
)
def test_driver_that_fails_gives_the_reason(failure: dict[str, str], reason: str, tmp_path: Path) -> None:
    assert list_gpus(driver(tmp_path, "A"), FIELD="gpu_failure", **failure) == reason
    assert list_gpus(tmp_path, **failure) == "()"


def test_doctor_reports_a_driver_that_fails(tmp_path: Path) -> None:
    variables = {"LD_LIBRARY_PATH": str(driver(tmp_path, "A")), "TRITON_LIBCUDA_PATH": "", "FAILS": "999"}
    command = [sys.executable, "-c", DOCTOR]
    result = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True).stdout
    assert "the CUDA driver fails: cuInit returns CUDA_ERROR_UNKNOWN (999)" in result
    assert "nvidia-smi" in result


def test_gpus_equal_those_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the reference")
    if this_machine().gpus and torch.version.cuda is None:
        pytest.skip("this PyTorch has no GPU support")
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = this_machine().gpus
    assert [(gpu.name, gpu.capability) for gpu in gpus] == [(gpu.name, f"{gpu.major}.{gpu.minor}") for gpu in devices]
    for ours, theirs in zip(gpus, devices, strict=True):
        assert ours.memory_bytes == pytest.approx(theirs.total_memory, rel=0.02)
