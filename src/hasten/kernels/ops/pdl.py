"""Programmatic dependent launch (Hopper and newer): a kernel starts while the previous one is still running.

It loads data that does not depend on the previous kernel, such as weights, before it waits for that kernel's results.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETED:
    # The interpreter runs one program after the other: there is nothing to wait for.
    @triton.jit
    def wait_for_previous_kernel(use_pdl: tl.constexpr): ...
else:
    _launch_next, _wait = tl.extra.cuda.gdc_launch_dependents, tl.extra.cuda.gdc_wait

    @triton.jit
    def wait_for_previous_kernel(use_pdl: tl.constexpr):
        """Let the next kernel start, then wait for the results of the previous one."""
        if use_pdl:
            _launch_next()
            _wait()


def shared_bytes(device: int) -> int:
    """Return the shared memory that one program may use on this GPU."""
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


def pdl_options(use_pdl: bool) -> dict[str, Any]:
    """Return a kernel's `use_pdl` argument and the launch option that belongs to it."""
    return {"use_pdl": use_pdl} | ({"launch_pdl": True} if use_pdl and not IS_INTERPRETED else {})
