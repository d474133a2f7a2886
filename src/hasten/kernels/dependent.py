"""Programmatic dependent launch: a kernel starts while the one in front of it runs, and waits where it needs it.

What does not come from the kernel in front, weights above all, is loaded before the wait. Hopper and newer.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETED:
    # One program after the other: there is nothing to wait for.
    @triton.jit
    def wait_for_previous(): ...

    @triton.jit
    def let_next_start(): ...
else:
    wait_for_previous = tl.extra.cuda.gdc_wait
    let_next_start = tl.extra.cuda.gdc_launch_dependents


def shared_bytes(device: int) -> int:
    """What a program may hold on this GPU."""
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


def launching(is_dependent: bool) -> dict[str, Any]:
    """What a launch is given beside the kernel's own arguments."""
    return {"launch_pdl": True} if is_dependent and not IS_INTERPRETED else {}
