"""Copy between pinned host memory and the device with a kernel.

Inside a CUDA graph, the hand-over to the copy engine and back takes longer than a small copy. Large copies are left to
the copy engine, so that they do not occupy the multiprocessors.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_BLOCK = 2048
_MAX_KERNEL_COPY_BYTES = 2**20


def host_copy(source: Any, target: Any) -> None:
    """Copy `source` into `target`, which has the same size and dtype; the one on the host is pinned."""
    count = source.numel()
    if count * source.element_size() > _MAX_KERNEL_COPY_BYTES:
        target.copy_(source, non_blocking=True)
        return
    _copy[(triton.cdiv(count, _BLOCK),)](source.contiguous(), target, count, block=_BLOCK)


@triton.jit
def _copy(source, target, count, block: tl.constexpr):
    index = tl.program_id(0) * block + tl.arange(0, block)
    is_inside = index < count
    tl.store(target + index, tl.load(source + index, mask=is_inside), mask=is_inside)
