"""Which GPUs there are, as CUDA's driver tells it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivers import driver, management
from hasten.core.hardware import Gpu, this_machine

TELL = "from hasten.core.hardware import this_machine; print(this_machine().gpus)"


def told(folder: Path, **variables: str) -> str:
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": ""} | variables
    asked = subprocess.run([sys.executable, "-c", TELL], env=environment, capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def test_gpus_are_those_that_the_driver_shows_in_its_order(tmp_path: Path) -> None:
    driver(management(tmp_path), "A", "B")
    assert told(tmp_path) == str((Gpu("A", 80 << 30, "9.0", "580.1"), Gpu("B", 81 << 30, "9.1", "580.1")))


def test_without_the_management_library_the_driver_is_the_cuda_it_is_for(tmp_path: Path) -> None:
    driver(management(tmp_path, is_broken=True), "A")
    assert "'CUDA 13.2'" in told(tmp_path)


def test_it_may_lie_where_triton_is_told_to_look(tmp_path: Path) -> None:
    for name in "AB":
        (tmp_path / name).mkdir()
        driver(tmp_path / name, name)
    assert "name='B'" in told(tmp_path / "A", TRITON_LIBCUDA_PATH=str(tmp_path / "B"))
    assert "name='A'" in told(tmp_path / "A", TRITON_LIBCUDA_PATH=str(tmp_path / "C"))


@pytest.mark.parametrize("how", ["FAILS", "CRASHES"])
def test_a_driver_that_does_not_work_has_no_gpus_and_takes_nobody_with_it(how: str, tmp_path: Path) -> None:
    assert told(driver(tmp_path, "A"), **{how: "1"}) == "()"


def test_what_pytorch_sees_is_what_we_see() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is what is compared with")
    if this_machine().gpus and torch.version.cuda is None:
        pytest.skip("this PyTorch knows no GPUs")
    seen = [torch.cuda.get_device_properties(place) for place in range(torch.cuda.device_count())]
    gpus = this_machine().gpus
    assert [(gpu.name, gpu.capability) for gpu in gpus] == [(gpu.name, f"{gpu.major}.{gpu.minor}") for gpu in seen]
    for ours, theirs in zip(gpus, seen, strict=True):
        assert ours.memory_bytes == pytest.approx(theirs.total_memory, rel=0.02)
