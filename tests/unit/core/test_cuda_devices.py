"""GPUs are listed as the CUDA driver reports them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.core.system.hardware import Gpu, this_machine
from support.fakes.cuda_driver import driver, management

PROGRAM = "from hasten.core.system.hardware import this_machine; print(this_machine().gpus)"


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


@pytest.mark.parametrize("failure", ["FAILS", "CRASHES"])
def test_broken_driver_means_no_gpus_and_no_crash(failure: str, tmp_path: Path) -> None:
    assert list_gpus(driver(tmp_path, "A"), **{failure: "1"}) == "()"


def test_gpus_equal_those_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the reference")
    if this_machine().gpus and torch.version.cuda is None:
        pytest.skip("this PyTorch has no GPU support")
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = this_machine().gpus
    assert [(gpu.name, gpu.capability) for gpu in gpus] == [(gpu.name, f"{gpu.major}.{gpu.minor}") for gpu in devices]
    for ours, theirs in zip(gpus, devices, strict=True):
        assert ours.memory_bytes == pytest.approx(theirs.total_memory, rel=0.02)
