"""What Triton's interpreter lets pass, its compiler may not: kernels for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "compiling.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "narrow"), [(90, "fp8"), (89, "fp8"), (80, "int8"), (90, "int8"), (80, "fp16"), (90, "fp16")]
)
def test_kernels_compile(capability: int, narrow: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, str(capability), narrow], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
