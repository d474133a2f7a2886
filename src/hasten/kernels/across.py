"""Copies between the host and the device by a kernel.

In a graph of kernels the copy engine is somebody else: handing over to it and back takes longer than a small copy. A
large one is left to it: the multiprocessors have better to do.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_BLOCK = 2048
_MOST_BYTES = 2**20


def across(source: Any, target: Any) -> None:
    """As many numbers of one kind; what lies on the host is pinned."""
    count = source.numel()
    if count * source.element_size() > _MOST_BYTES:
        target.copy_(source, non_blocking=True)
        return
    _copy[(triton.cdiv(count, _BLOCK),)](source.contiguous(), target, count, block=_BLOCK)


@triton.jit
def _copy(source, target, count, block: tl.constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    is_there = place < count
    tl.store(target + place, tl.load(source + place, mask=is_there), mask=is_there)
