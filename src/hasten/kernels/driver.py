"""CUDA's driver itself, for what PyTorch does not offer of graphs."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from hasten.core.errors import StageError


@cache
def library() -> ctypes.CDLL:
    """The one that PyTorch has loaded."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    status = getattr(library(), name)(*arguments)
    if status != 0:
        raise StageError(f"{name} failed with status {status}")
