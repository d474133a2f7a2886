"""Kernels compile for GPUs that are not present: Triton's compiler rejects code that its interpreter accepts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.virtualenvs import user_cache

SCRIPT = Path(__file__).parents[1] / "scripts" / "compile_kernels.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "precision"), [(90, "fp8"), (89, "fp8"), (80, "int8"), (90, "int8"), (80, "fp16"), (90, "fp16")]
)
def test_kernels_compile_for_capability(capability: int, precision: str) -> None:
    # Triton's keys cover the source, the options and its version: only kernels that changed are compiled again.
    cache = str(user_cache() / "triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    command = [sys.executable, SCRIPT, str(capability), precision]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
